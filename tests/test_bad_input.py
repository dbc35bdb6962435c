"""Bad input: one sentence that names the setting, the value and what would be right."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlamb as fl
from problems import Small

SMALL = Small()


def linear(*sizes):
    return fl.mlp(sizes[0], sizes[1:-1], sizes[-1])


X, Y = torch.zeros(10, 4), torch.zeros(10, dtype=torch.int64)
GOOD = {"train": (X, Y), "test": (X, Y)}


def with_nan():
    x = X.clone()
    x[7, 2] = float("nan")
    return x


class Empty(nn.Module):
    def forward(self, x):
        return x


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = fl.mlp(4, [], 3)

    def forward(self, x):
        return self.layer(x), x


class Shrinking(Pair):
    def forward(self, x):
        for p in self.layer.parameters():
            p.data.mul_(0.9)
        return self.layer(x)


class Detached(Pair):
    def forward(self, x):
        return self.layer(x).detach()


def with_a_penalty(model):
    def penalised(out, target):
        return nn.functional.cross_entropy(out, target) + model[1].weight.square().sum()

    return penalised


def with_batch_norm(rows):
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    clients = [range(4), range(4, 4 + rows)]
    return fl.fit(
        fl.FedSGD(lr=0.1), fl.Task(model, **GOOD), clients=clients, rounds=1, batch_size=4
    )


PROBLEMS = {
    "batch norm on one example": (
        lambda: with_batch_norm(rows=5),
        "batch_size = 4: leaves a batch of one of a client's 5 rows, which batch norm cannot take",
    ),
    "one width": (lambda: fl.mlp(4, 5, 3), "hidden = 5: must be a list of widths, such as [5]"),
    "a torch Dataset": (
        lambda: fl.Task(linear(4, 3), torch.utils.data.TensorDataset(X, Y), (X, Y)),
        "train = 'TensorDataset': must be a pair (inputs, targets) of tensors; a TensorDataset has",
    ),
    "loss of parameters": (
        lambda: fl.Task(linear(4, 3), loss=with_a_penalty(linear(4, 3)), **GOOD),
        "loss = 'penalised': must depend on outputs and targets alone: parameters of its own",
    ),
    "negative rate": (
        lambda: fl.FedLAMB(lr=-0.1),
        "lr = -0.1: must be a positive number, for example 0.01",
    ),
    "rate of the wrong type": (lambda: fl.FedSGD(lr="fast"), "lr = 'fast': must be a positive"),
    "rate not a number": (lambda: fl.FedSGD(lr=float("nan")), "lr = nan: must be a positive"),
    "beta of one": (lambda: fl.FedAMS(lr=1.0, beta1=1.0), "beta1 = 1.0: must be a number from 0"),
    "eps of zero": (lambda: fl.Mime(lr=1.0, eps=0), "eps = 0: must be a positive number"),
    "no such first round": (
        lambda: fl.FedAMS(lr=1.0, first_round="global"),
        "first_round = 'global': must be 'local' or 'vhat'",
    ),
    "no such momentum": (
        lambda: fl.FedAMS(lr=1.0, momentum="keep"),
        "momentum = 'keep': must be 'persist' or 'reset'",
    ),
    "no such layers": (
        lambda: fl.FedLAMB(lr=1.0, layers="row"),
        "layers = 'row': must be 'tensor'",
    ),
    "phi upside down": (
        lambda: fl.FedLAMB(lr=1.0, phi_min=2.0, phi_max=1.0),
        "phi_min = 2.0: must not be above phi_max, which is 1.0",
    ),
    "sync never": (
        lambda: fl.FedAMS(lr=1.0, sync_every=0),
        "sync_every = 0: must be a whole number",
    ),
    "schedule in rounds": (
        lambda: fl.FedSGD(lr=1.0, schedule=30),
        "schedule = 30: must be a function",
    ),
    "decay at round 0": (
        lambda: fl.StepDecay((0,)),
        "schedule.after = (0,): must be round numbers",
    ),
    "no model": (lambda: fl.Task("mlp", **GOOD), "model = 'str': must be a torch.nn.Module"),
    "model without parameters": (
        lambda: fl.Task(Empty(), **GOOD),
        "model = 'Empty': has no parameters to train",
    ),
    "model of another width": (
        lambda: fl.Task(linear(5, 3), **GOOD),
        "model = 'Sequential': must fit inputs of shape (4,) and targets of shape () each",
    ),
    "test of another width": (
        lambda: fl.Task(linear(4, 3), train=(X, Y), test=(X[:, :3], Y)),
        "must have the shapes of train: inputs (4,)",
    ),
    "fewer targets than inputs": (
        lambda: fl.Task(linear(4, 3), train=(X, Y[:-1]), test=(X, Y)),
        "train = 'inputs (10, 4), targets (9,)': must hold one target for each input",
    ),
    "no data": (
        lambda: fl.Task(linear(4, 3), train=(X[:0], Y[:0]), test=(X, Y)),
        "train = 'inputs (0, 4), targets (0,)': must hold one target",
    ),
    "not a pair": (
        lambda: fl.Task(linear(4, 3), train=X, test=(X, Y)),
        "train = 'Tensor': must be a pair (inputs, targets)",
    ),
    "NaN in the data": (
        lambda: fl.Task(linear(4, 3), train=(with_nan(), Y), test=(X, Y)),
        "train inputs = '1 rows with NaN or infinity': must be finite numbers; "
        "the first bad row is 7",
    ),
    "infinity in the targets": (
        lambda: fl.Task(linear(4, 1), train=(X, torch.full((10, 1), np.inf)), test=(X, X[:, :1])),
        "train targets = '10 rows with NaN or infinity': must be finite",
    ),
    "label past the outputs": (
        lambda: fl.Task(linear(4, 3), train=(X, Y + 3), test=(X, Y)),
        "train targets = 'labels from 3 to 3': must lie from 0 to 2",
    ),
    "outputs that would be broadcast": (
        lambda: fl.Task(linear(4, 1), train=(X, X[:, 0]), test=(X, X[:, 0])),
        "model = 'Sequential': must fit",
    ),
    "loss without a mean": (
        lambda: fl.Task(linear(4, 3), **GOOD, loss=nn.CrossEntropyLoss(reduction="none")),
        "loss = 'CrossEntropyLoss': must return a scalar",
    ),
    "targets that would be broadcast": (
        lambda: fl.Task(
            linear(4, 1), train=(X, X[:, 0]), test=(X, X[:, 0]), loss=nn.functional.huber_loss
        ),
        "loss = 'huber_loss': must fit",
    ),
    "bytes for inputs": (
        lambda: fl.Task(linear(4, 3), train=(X.byte(), Y), test=(X.byte(), Y)),
        "inputs are torch.uint8",
    ),
    "a model of two outputs": (
        lambda: fl.Task(Pair(), **GOOD),
        "model = 'Pair': must return one tensor, and returns a tuple",
    ),
    "a model that changes itself": (
        lambda: fl.Task(Shrinking(), **GOOD),
        "model = 'Shrinking': must not change its parameters in forward, and changes layer",
    ),
    "a model without a gradient": (
        lambda: fl.Task(Detached(), **GOOD),
        "model = 'Detached': must give outputs with a gradient",
    ),
    "a lazy model": (lambda: fl.Task(nn.LazyLinear(3), **GOOD), "has lazy parameters"),
    "metrics without names": (
        lambda: fl.Task(linear(4, 3), **GOOD, metrics=[fl.accuracy]),
        "must be a dictionary from name to function",
    ),
    "a metric per example": (
        lambda: fl.Task(linear(4, 3), **GOOD, metrics={"hits": lambda out, y: out[:, 0]}),
        "metrics['hits'] = '<lambda>': must map (outputs, targets) to one number",
    ),
    "clients by name": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), clients={"a": [0]}),
        "clients = {'a': [0]}: must be a list with the rows of each client",
    ),
    "clients by letters": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), clients=[["a"]]),
        "clients[0] = ['a']: must be a list of row numbers",
    ),
    "samples instead of their number": (lambda: fl.iid(X, 3), "samples = tensor"),
    "decay after one number": (lambda: fl.StepDecay(30), "schedule.after = 30: must be round"),
    "fraction 0": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), fraction=0),
        "fraction = 0: must be above 0 and at most 1, for example 0.5",
    ),
    "fraction 2": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), fraction=2),
        "fraction = 2: must be above 0",
    ),
    "no rounds": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), rounds=0),
        "rounds = 0: must be a whole number from 1 on",
    ),
    "half a batch": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), batch_size=0.5),
        "batch_size = 0.5: must be a whole number",
    ),
    "negative seed": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), seed=-1),
        "seed = -1: must be a whole number",
    ),
    "no such weighting": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), weighting="size"),
        "weighting = 'size': must be 'uniform' or 'examples'",
    ),
    "a class for an algorithm": (lambda: SMALL.fit(fl.FedSGD), "must be an algorithm such as"),
    "a name for an algorithm": (lambda: SMALL.fit("fed-lamb"), "algorithm = 'fed-lamb': must be"),
    "no clients": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), clients=[]),
        "clients = []: must be a list",
    ),
    "a number of clients": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), clients=50),
        "clients = 50: must be a list with the rows of each client",
    ),
    "empty client": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), clients=[[0, 1], []]),
        "clients[1] = []: must hold at least one row",
    ),
    "row out of range": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), clients=[[0], [20]]),
        "clients[1] = 'rows from 20 to 20': must lie from 0 to 19",
    ),
    "rows that are no numbers": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), clients=[[0.5]]),
        "clients[0] = [0.5]: must be a list of row numbers",
    ),
    "more clients than samples": (
        lambda: fl.iid(samples=10, n=11),
        "n = 11: needs 11 samples at least (1 for each client), and there are 10; use at most 10",
    ),
    "more shards than samples": (
        lambda: fl.shards(Y, n=6, per_client=2),
        "n = 6: needs 12 samples at least (2 for each client), and there are 10; use at most 5",
    ),
    "seed past 64 bits": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), seed=2**70),
        "must be a whole number from 0 on, below 2**63",
    ),
    "compile by a word": (
        lambda: SMALL.fit(fl.FedSGD(lr=0.1), compile="no"),
        "compile = 'no': must be True or False",
    ),
    "a schedule of words": (
        lambda: fl.FedAMS(lr=0.1, schedule=lambda r: "a"),
        "must be a function from round number to factor, from 0 on",
    ),
    "a schedule uphill": (
        lambda: fl.FedSGD(lr=0.1, schedule=lambda r: -1),
        "must be a function from round number to factor, from 0 on",
    ),
    "dealt to too many": (
        lambda: SMALL.fit(
            fl.FedSGD(lr=0.1), clients=fl.PerRound(lambda k, s: fl.iid(20, k + 1, seed=s), n=5)
        ),
        "clients.deal = '6 parts': must deal to the 5 clients of a round",
    ),
    "other targets to test": (
        lambda: fl.Task(fl.mlp(4, [], 3), train=(X, Y), test=(X, Y.float())),
        "test = 'torch.float32 targets': must have targets like those of train, which are",
    ),
    "labels that are words": (
        lambda: fl.shards(["a", "b"] * 20, n=4),
        "labels = 'list': must be one whole number for each row",
    ),
    "labels that are no labels": (
        lambda: fl.shards(X, n=2),
        "labels = 'float32 (10, 4)': must be one whole number for each row",
    ),
}


@pytest.mark.parametrize(("call", "message"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_bad_input_is_told_in_one_sentence(call, message):
    with pytest.raises(fl.SettingError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_batch_norm_takes_batches_of_two_and_of_one_where_there_are_pixels() -> None:
    list(with_batch_norm(rows=6))
    with torch.random.fork_rng():
        layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
    data = torch.zeros(10, 1, 4, 4), Y
    task = fl.Task(nn.Sequential(*layers), data, data)
    list(fl.fit(fl.FedSGD(lr=0.1), task, clients=[range(4), range(4, 9)], rounds=1, batch_size=4))


def test_hyperparameters_that_a_method_does_not_have_are_refused():
    with pytest.raises(TypeError, match="weight_decay"):
        fl.FedAMS(lr=0.1, weight_decay=0.1)
    with pytest.raises(TypeError, match="server_lr"):
        fl.FedLAMB(lr=0.1, server_lr=0.1)
    with pytest.raises(TypeError, match="beta1"):
        fl.FedSGD(lr=0.1, beta1=0.9)


def test_numbers_and_rows_of_any_kind_are_taken():
    """NumPy's scalars, labels of any whole type, rows as ranges, arrays or sets."""
    algorithm = fl.FedLAMB(lr=np.float32(0.1), sync_every=np.int64(2))
    assert type(algorithm.lr) is float
    assert type(algorithm.sync_every) is int
    for kind in (torch.int8, torch.uint8, torch.int32, torch.bool):
        task = fl.Task(linear(4, 3), train=(X, Y.to(kind)), test=(X, Y.to(kind)))
        assert task.train[1].dtype == torch.int64
    clients = [range(3), np.arange(3, 5), {6, 5}, torch.tensor([7])]
    run = fl.fit(algorithm, task, clients=iter(clients), rounds=np.int64(1), fraction=np.float32(1))
    assert next(run).clients == [0, 1, 2, 3]


def test_an_algorithm_that_lacks_a_part_is_told_which() -> None:
    class Part(fl.FedSGD):
        client_begin = broadcast = None  # type: ignore[assignment]

    with pytest.raises(fl.SettingError, match="'Part': lacks broadcast, client_begin; an algor"):
        fl.fit(Part(lr=0.1), Small().task(), clients=Small().clients(), rounds=1)


def test_an_algorithm_whose_server_loses_the_model_is_told_where() -> None:
    class Starts(fl.FedSGD):
        def server_init(self, params: Any) -> Any:
            return {"params": params}

    class Updates(fl.FedSGD):
        def server_update(self, server: Any, mean: Any) -> Any:
            kept = dict(list(server.params.items())[1:])
            return super().server_update(server, mean)._replace(params=kept)

    options: Any = {"clients": Small().clients(), "rounds": 1, "batch_size": 4}
    with pytest.raises(fl.SettingError, match=r"'Starts': must return from server_init a state"):
        fl.fit(Starts(lr=0.1), Small().task(), **options)
    with pytest.raises(fl.SettingError, match=r"'Updates': must return from server_update a state"):
        next(fl.fit(Updates(lr=0.1), Small().task(), **options))
