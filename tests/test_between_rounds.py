"""What the vectorised executor does ahead of a round, and what it hands on from one to the next.

Graphs are played by a stand-in that, like a graph, works in the same memory every time.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlamb as fl
from fedlamb.algorithm import AnyAlgorithm
from fedlamb.simulate import cuda_graph, padding
from fedlamb.simulate.client_store import ClientStore
from fedlamb.simulate.findings import Findings, read
from fedlamb.simulate.lanes import Lanes
from fedlamb.simulate.nested import Structure, tree_flatten, tree_map, tree_unflatten
from problems import Small
from test_executors import METHODS, close, every_method

SMALL = Small(sizes=(6, 6, 6, 6), rounds=5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_step_reads_once_what_all_clients_share() -> None:
    # Fed-LAMB divides by what all were sent. Of unequal clients, some rest while others go on.
    for sizes in ((6, 6, 6, 6), (9, 9, 4, 4)):
        small = replace(SMALL, sizes=sizes)
        options: Any = {"executor": "vectorised", "clients": small.clients()}
        plain, compiled = (
            small.fit(METHODS["fed-lamb"], compile=c, **options) for c in (False, True)
        )
        close(plain, compiled)
        known = [*compiled._executor.stack._compiled._known.values()]
        shared = len(compiled.params)
        assert all(program.whole.count(False) == shared for program in known)
        assert all(sum(k is not None for k in program.kept) == shared for program in known)
        steps = 2 if sizes == (6, 6, 6, 6) else 3
        assert len(known) <= steps  # none compiled twice


@dataclass
class StandIn:
    """Runs a program in memory of its own."""

    program: Any
    inputs: list[Tensor]
    structure: Structure
    outputs: list[Tensor]

    def replay(self) -> None:
        own = tree_unflatten([t.clone() for t in self.inputs], self.structure)
        for mine, new in zip(self.outputs, tree_flatten(self.program(own))[0], strict=True):
            mine.copy_(new)

    @staticmethod
    def record(program: Any, tensors: list[Tensor], structure: Structure, _: Any) -> Any:
        inputs = [t.clone() for t in tensors]
        outputs, of = tree_flatten(program(tree_unflatten(inputs, structure)))
        own = [torch.zeros_like(t) for t in outputs]
        graph: Any = StandIn(program, inputs, structure, own)
        return cuda_graph._Graph(graph, inputs, own, of)


Start = Callable[..., fl.Run]


@pytest.fixture(params=["plain", "replayed", "ahead"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs of the vectorised executor: plain, with a graph from the second round on, and as on a
    GPU, where the next round is launched before this one is told as well."""
    monkeypatch.setattr(cuda_graph._Graph, "record", staticmethod(StandIn.record))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())

    def started(method: AnyAlgorithm, **options: Any) -> fl.Run:
        fit = partial(fl.fit, task=options.pop("task")) if "task" in options else SMALL.fit
        run = fit(method, executor="vectorised", **options)
        if request.param != "plain":
            run._executor.stack._replayed = cuda_graph.Replayed()
        run._looks_ahead = request.param == "ahead"
        return run

    return started


@every_method
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("at_once", [None, 2, 1])
def test_rounds_in_one_piece_and_in_parts_are_the_same_with_graphs_and_without(
    start: Start, method: Any, fraction: float, at_once: int | None
) -> None:
    run = start(method, fraction=fraction)
    run._executor.stack._at_once = at_once
    close(run, SMALL.fit(method, executor="vectorised", fraction=fraction))
    replayed = run._executor.stack._replayed
    assert replayed is None or any(replayed._graphs.values())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["fed-sgd", "mime-lamb"])
def test_a_compiled_run_goes_on_to_the_same_bits(start: Start, name: str, tmp_path: Path) -> None:
    # In float32 a compiled step and a plain one differ.
    small = replace(SMALL, sizes=(40, 40, 40, 40), inputs=20)
    (x, y), module = small.data(), small.module().float()
    task = fl.Task(module, (x.astype(np.float32), y), (x.astype(np.float32), y))
    options: Any = {"clients": small.clients(), "rounds": 5, "batch_size": 16, "fraction": 0.5}

    def run(compile: bool) -> fl.Run:
        return start(METHODS[name], task=task, compile=compile, **options)

    plain, whole, later = run(False), run(True), run(True)
    list(plain)
    for done in whole:
        if done.number == 2:
            whole.save(tmp_path / "run")
    later.restore(tmp_path / "run")
    list(later)
    assert all(torch.equal(value, later.params[key]) for key, value in whole.params.items())
    assert any(not torch.equal(value, plain.params[key]) for key, value in whole.params.items())


class Stream:
    """A stream that does all at once, and notes who waited for whom."""

    waits: list[tuple[Any, Any]]

    def __init__(self, *_: Any) -> None:
        Stream.waits = []

    def wait_stream(self, other: Any) -> None:
        Stream.waits.append((self, other))


@pytest.mark.parametrize(
    ("trials", "clients", "parts"), [(1, 25, 5), (1, 8, 4), (1, 7, 1), (3, 25, 1)]
)
def test_parts_of_a_cohort_side_by_side_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, trials: int, clients: int, parts: int
) -> None:
    here = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    data = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1)
    with torch.random.fork_rng():
        lanes = Lanes(fl.Task(nn.Conv2d(1, 1, 1), data, data))
    assert lanes._most == 1  # on a CPU
    lanes._most, seen = 5, []

    def double(tree: Any, other: Tensor) -> Any:
        seen.append(other.shape[1])
        return {"x": 2 * tree["x"], "y": other + 1}

    x = torch.arange(trials * clients * 3.0).reshape(trials, clients, 3)
    for _ in range(2):
        found = lanes(double, {"x": x}, x[..., 0])
        assert torch.equal(found["x"], 2 * x)
        assert torch.equal(found["y"], x[..., 0] + 1)
    assert seen == [clients // parts] * parts * 2
    own = lanes._streams
    assert len(own) == (parts if parts > 1 else 0)  # the same again
    once = [(stream, here) for stream in own] + [(here, stream) for stream in own]
    assert Stream.waits[-len(once) :] == once if own else Stream.waits == []


def test_rounds_that_do_not_repeat_are_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    ragged = replace(SMALL, sizes=(6, 5, 4, 3))
    options: Any = {"executor": "vectorised"}
    for fraction, repeats in ((0.5, False), (1.0, True)):
        run = ragged.fit(
            METHODS["fed-lamb"], executor="vectorised", compile=True, fraction=fraction
        )
        assert run._executor._compile is run.plan.repeats is repeats
        assert ("not compiled" in capsys.readouterr().err) is not repeats
    for deal, repeats in ((fl.iid, True), (by_seed, False)):
        clients = fl.PerRound(partial(deal, 18), 4)
        run = ragged.fit(METHODS["fed-lamb"], clients=clients, **options)
        assert run.plan.repeats is repeats


def by_seed(samples: int, n: int, seed: int) -> list[np.ndarray]:
    """Parts of other sizes under every seed."""
    cuts = np.random.default_rng(seed).choice(range(1, samples), size=n - 1, replace=False)
    return np.split(np.arange(samples), np.sort(cuts))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_what_a_caller_holds_stays_as_it_was(start: Start, fraction: float) -> None:
    reports: list[Any] = []

    class Noting(fl.FedLAMB):
        def server_update(self, server: Any, mean: Any) -> Any:
            reports.append(mean)
            return super().server_update(server, mean)

    run = start(Noting(lr=0.03), fraction=fraction)
    held: list[Any] = []
    for _ in run:
        now = dict(run.store.states), dict(run.changed), run.server, reports[-1]
        held.append((now, tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, now)))
    for was, copy in held:
        for one, two in zip(tree_flatten(was)[0], tree_flatten(copy)[0], strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))


def test_what_is_measured_is_what_evaluate_finds(start: Start) -> None:
    (x, y), aside = SMALL.data(), replace(SMALL, seed=5).data()
    task = fl.Task(SMALL.module(), (x, y), (x, y), validation=aside)
    run = start(METHODS["fed-lamb"], task=task, clients=SMALL.clients(), rounds=5)
    for done in run:
        expected = task.evaluate(run.params, run.buffers)
        assert len(expected) == 4
        assert {name: done.metrics[name] for name in expected} == expected
    replayed = run._executor.stack._replayed
    assert replayed is None or any(key[0] == "measure" for key in replayed._graphs)


def test_a_metric_of_ones_own_sees_every_round(start: Start) -> None:
    calls: list[int] = []

    def noting(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(targets))
        return outputs.sum()

    x, y = SMALL.data()
    task = fl.Task(SMALL.module(), (x, y), (x, y), metrics={"sum": noting})
    calls.clear()
    assert len(list(start(METHODS["mime"], task=task, clients=SMALL.clients(), rounds=5))) == 5
    assert calls == [len(y)] * 5


def test_a_cohort_that_comes_again_is_not_stacked_again() -> None:
    run = SMALL.fit(METHODS["fed-lamb"], executor="vectorised")
    next(run), next(run)
    cohort = run.plan.cohort(2)
    once, again = run.store.stacked(cohort), run.store.stacked(cohort)
    assert all(a is b for a, b in zip(once, again, strict=True))
    for i, client in enumerate(cohort):
        for leaf, own in zip(once, run.store.state(client).m.values(), strict=True):
            assert torch.equal(leaf[i], own)
    some = run.store.stacked(cohort[1:])
    assert all(torch.equal(a[1:], b) for a, b in zip(once, some, strict=True))
    turned = run.store.stacked(cohort[::-1])
    assert all(torch.equal(a.flip(0), b) for a, b in zip(once, turned, strict=True))


def test_states_from_elsewhere_take_the_place_of_a_stack(tmp_path: Any) -> None:
    """A checkpoint, another process, or a caller."""
    run = SMALL.fit(METHODS["fed-lamb"], executor="vectorised")
    next(run)
    run.save(tmp_path / "c")
    whole = [r.metrics for r in run]
    run.restore(tmp_path / "c")
    assert [r.metrics for r in run] == whole
    other = tree_map(torch.zeros_like, run.store.state(2))

    def only_the_third_is_other() -> None:
        for leaf, old in zip(run.store.stacked([0, 1, 2, 3]), before, strict=True):
            assert not leaf[2].any()
            assert torch.equal(leaf[3], old[3])

    before = run.store.stacked([0, 1, 2, 3])
    run.store.guests[2] = other
    only_the_third_is_other()
    run.store.guests.clear()
    assert all(a is b for a, b in zip(run.store.stacked([0, 1, 2, 3]), before, strict=True))
    run.store.commit({2: other}, [2], {})
    only_the_third_is_other()
    assert [*run.store.states] == [0, 1, 3, 2]
    assert len(run.store) == 4


@pytest.mark.parametrize(("fraction", "shared"), [(1.0, True), (0.5, False)])
def test_a_state_keeps_only_its_own_memory_where_others_may_outlive_it(
    fraction: float, shared: bool
) -> None:
    run = SMALL.fit(METHODS["fed-lamb"], executor="vectorised", fraction=fraction)
    for done in run:
        for state in run.store.states.values():
            for leaf in state.m.values():
                own = leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
                assert own is not (shared and done.number > 1)
    one = ClientStore(lambda: run.algorithm.client_init(run.params), limit=1)
    leaves = [torch.stack([leaf] * 2) for leaf in run.params.values()]
    for state in one.unstacked([0, 1], leaves).values():
        assert all(t.untyped_storage().nbytes() == t.numel() * 8 for t in state.m.values())


def test_states_of_two_cohorts_that_take_turns_keep_only_their_own_memory() -> None:
    def takes_turns(run: fl.Run) -> bool:
        one, two, three, _ = (run.plan.cohort(number) for number in range(1, 5))
        return one == three and {*one} & {*two} == set()

    runs = (looking_ahead(METHODS["fed-lamb"], fraction=0.5, seed=seed) for seed in range(1000))
    run = next(filter(takes_turns, runs))
    for _ in range(4):  # the third is launched where only the first has been told
        next(run)
        for state in run.store.states.values():
            for leaf in state.m.values():
                assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()


def test_an_algorithm_that_writes_on_its_state_does_not_reach_the_store(start: Start) -> None:
    class InPlace(fl.FedAMS):
        def client_begin(self, client: Any, sent: Any, full_grad_at: Any) -> Any:
            for m in client.m.values():
                m.mul_(0.5)
            return super().client_begin(client, sent, full_grad_at)

    run, held = start(InPlace(lr=0.01)), []
    for _ in run:
        held.append((run.store.states, tree_map(torch.clone, run.store.states)))
    for was, copy in held:
        for one, two in zip(tree_flatten(was)[0], tree_flatten(copy)[0], strict=True):
            assert torch.equal(one, two)


def test_a_round_is_launched_before_the_one_before_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = looking_ahead(METHODS["fed-lamb"])
    told: list[Any] = []
    true_run, true_read = run._executor.run, fl.simulate.fit.read

    def noted_run(round: int, *given: Any) -> Any:
        told.append(f"run {round}")
        return true_run(round, *given)

    def noted_read(findings: Any) -> Any:
        told.append("read")
        return true_read(findings)

    monkeypatch.setattr(run._executor, "run", noted_run)
    monkeypatch.setattr(fl.simulate.fit, "read", noted_read)
    assert len(list(run)) == 5
    ahead = [part for number in range(2, 6) for part in (f"run {number}", "read")]
    assert told == ["run 1", *ahead, "read"]


def looking_ahead(method: Any, small: Small = SMALL, **options: Any) -> fl.Run:
    """As on a GPU."""
    run = small.fit(method, executor="vectorised", **options)
    run._looks_ahead = True
    return run


def seen(run: fl.Run) -> list[Any]:
    """All that is told of the rest of a run, but for the time."""
    return [replace(r, seconds=0.0) for r in run]


@every_method
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_run_that_looks_ahead_resumes_from_the_round_that_was_told(
    tmp_path: Any, method: Any, fraction: float
) -> None:
    run = looking_ahead(method, fraction=fraction)
    next(run), next(run)
    assert run._ahead is not None
    assert run.number == 2
    run.save(tmp_path / "c")
    rest = seen(run)
    for other in (run, SMALL.fit(method, executor="vectorised", fraction=fraction)):
        other.restore(tmp_path / "c")  # a round that was launched from elsewhere does not count
        assert other.number == 2
        assert seen(other) == rest
    assert len(rest) == 3


def test_a_model_that_is_put_in_its_place_is_what_the_next_round_goes_out_from() -> None:
    runs = [looking_ahead(METHODS["mime"]), SMALL.fit(METHODS["mime"], executor="vectorised")]
    for run in runs:
        next(run)
        run.server = run.server._replace(params=tree_map(torch.ones_like, run.server.params))
    close(*runs)


@pytest.mark.parametrize("fails", [KeyboardInterrupt, RuntimeError])
def test_a_round_that_is_launched_ahead_fails_in_its_turn(
    monkeypatch: pytest.MonkeyPatch, fails: type[BaseException]
) -> None:
    method = METHODS["mime-lamb"]
    run, whole = looking_ahead(method, fraction=0.5), seen(looking_ahead(method, fraction=0.5))
    done = [next(run)]
    true, broken = run._executor.run, {3: fails}

    def run_or_fail(round: int, *given: Any) -> Any:
        if round in broken:
            raise broken[round]
        return true(round, *given)

    monkeypatch.setattr(run._executor, "run", run_or_fail)
    if fails is RuntimeError:  # an interrupt stops at once, before the second round is told
        done.append(next(run))
    at, params, states = run.number, run.params, dict(run.store.states)
    with pytest.raises(fails):
        next(run)
    assert (run.number, run.params) == (at, params)
    assert run.store.states == states
    broken.clear()
    assert [replace(r, seconds=0.0) for r in done] + seen(run) == whole


@pytest.mark.filterwarnings("ignore:the model is no longer finite")
def test_nothing_is_launched_after_the_last_round_or_a_diverged_one() -> None:
    method, small = fl.FedSGD(lr=1e20), Small(kind="regression", rounds=50)
    run = looking_ahead(method, small)
    told, plain = seen(run), seen(small.fit(method, executor="vectorised"))
    assert repr(told) == repr(plain)  # NaN is not itself
    assert run.diverged
    assert run._ahead is None
    run = looking_ahead(METHODS["fed-lamb"])
    list(run)
    assert run._ahead is None


@pytest.mark.parametrize("executor", ["loop", "vectorised"])
def test_a_round_is_asked_for_as_a_whole_before_the_next_is_planned(
    monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    run = SMALL.fit(METHODS["fed-lamb"], executor=executor)
    told: list[Any] = []

    def noted(place: Any, name: str) -> None:
        true = getattr(place, name)

        def function(*given: Any, **named: Any) -> Any:
            told.append(name)
            return true(*given, **named)

        monkeypatch.setattr(place, name, function)

    noted(run._executor, "run")
    noted(run.task, "measure")
    noted(fl.simulate.fit, "read")
    noted(run._executor._planned, "_assignments")
    list(run)
    first, last = ["run", "_assignments", "measure"], ["run", "measure", "read"]
    between = ["_assignments", "read", "run", "measure"]
    assert told == first + between * 4 + ["read"]
    assert told[-3:] == last


def test_data_are_laid_out_once_and_in_one_piece() -> None:
    run = SMALL.fit(METHODS["fed-lamb"], executor="vectorised")
    next(run)
    queues, ready = run._executor.stack._layout._ready
    assert [each.client for each in queues[0]] == run.plan.cohort(2)
    whole = {**ready.batches, **{f"data {n}": t for n, t in ready.data.items()}}
    assert len({t.untyped_storage().data_ptr() for t in whole.values()}) == 1
    work = [run._executor._planned.work(2)]
    for found, right in (
        (ready.batches, padding.padded_batches(work)[0]),
        (ready.data, padding.padded_data(work)),
    ):
        assert found.keys() == right.keys() - {"key"}  # which only random layers take
        assert all(torch.equal(found[name], right[name]) for name in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_number_that_is_not_finite_is_found_among_all(
    bad: float | None, dtype: torch.dtype
) -> None:
    top = torch.finfo(dtype).max
    params = {"a": torch.full((2, 3), top, dtype=dtype), "b": torch.full((4,), top, dtype=dtype)}
    params |= {"empty": torch.zeros(0, dtype=dtype)}
    if bad is not None:
        params["b"][2] = bad
    loss = torch.tensor(0.1, dtype=dtype)
    (told,) = read([Findings.of(loss, params, {"test": torch.tensor(0.2).double()})])
    assert told.diverged is (bad is not None)
    assert told.metrics == {"train_loss": float(loss), "test": float(torch.tensor(0.2))}
    (told,) = read([Findings.of(loss, {"empty": params["empty"]}, {})])
    assert not told.diverged


@pytest.mark.filterwarnings("ignore:the model is no longer finite")
def test_a_diverged_model_that_is_replaced_has_not_diverged(tmp_path: Any) -> None:
    run = Small(kind="regression", rounds=50).fit(fl.FedSGD(lr=1e20), executor="vectorised")
    run.save(tmp_path / "c")
    list(run)
    assert run.diverged
    run.restore(tmp_path / "c")
    assert not run.diverged
