"""Settings: presets, files, changes, and every mistake told in one sentence."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import fedlamb as fl
from fedlamb.experiment import build_run
from fedlamb.settings import load_experiment, presets, validate

SHAPES = {
    "mnist": (1, 28, 28),
    "fashion_mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "tiny_imagenet": (3, 64, 64),
}
PRESET = Path(__file__).parent.parent / "src/fedlamb/presets/digits.toml"


@pytest.mark.parametrize("name", presets())
def test_presets_are_valid_and_complete(name):
    experiment = load_experiment(name)
    assert set(experiment.algorithms) == set(fl.ALGORITHMS)
    if experiment.data.name == "digits":
        data = fl.digits()
    else:  # as large as the split needs, and empty
        x = torch.zeros((400, *SHAPES[experiment.data.name]), dtype=torch.uint8)
        y = torch.arange(400) % 10
        inputs = fl.Images(mean=(0.0,) * x.shape[1], std=(1.0,) * x.shape[1], crop=4)
        data = fl.Dataset((x, y), (x, y), [str(c) for c in range(10)], inputs)
    for method in experiment.algorithms:
        build_run(experiment, method, data)


def test_complete_settings_are_json_and_mean_the_same(tmp_path):
    """What a run folder stores gives the same federation, whatever later defaults are."""
    changes = [
        "algorithms.fed-lamb.schedule={after=[30, 70]}",
        "algorithms.mime.sync_every=3",
        "federation.weighting=examples",
    ]
    one = load_experiment("digits", changes)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(one.complete(), allow_nan=False))
    two = load_experiment(str(path))
    assert two.complete() == one.complete()
    for method in fl.ALGORITHMS:
        assert build_run(one, method).algorithm == build_run(two, method).algorithm
    assert one.complete()["algorithms"]["fed-ams"]["eps"] == 1e-8
    assert build_run(two, "fed-lamb").algorithm.schedule(31) == pytest.approx(0.1)


def test_a_settings_file_of_one_s_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(PRESET.read_text().replace("rounds = 60", "rounds = 7"))
    assert load_experiment(str(path)).federation.rounds == 7


def test_changes_take_toml_values_and_plain_words():
    experiment = load_experiment(
        "digits", ["split.kind=iid", "model.hidden=[8, 4]", "federation.fraction = 1", "title=x y"]
    )
    assert experiment.split.kind == "iid"
    assert experiment.model.hidden == [8, 4]
    assert experiment.federation.fraction == 1.0
    assert experiment.title == "x y"


MISTAKES = {
    "federation.rounds=-3": "federation.rounds = -3: must be greater than or equal to 1",
    "federation.rounds=many": "federation.rounds = 'many': must be a valid integer",
    "federation.rounds=2.5": "federation.rounds = 2.5: must be a valid integer",
    "federation.fraction=0": "federation.fraction = 0: must be greater than 0",
    "federation.fraction=2": "federation.fraction = 2: must be less than or equal to 1",
    "federation.round=9": "federation.round = 9: is no setting; did you mean 'rounds'? "
    "[federation] takes rounds, fraction, batch_size, epochs, weighting",
    "federatoin.rounds=9": "federatoin = {'rounds': 9}: is no setting; did you mean 'federation'?",
    "federation.weighting=size": "federation.weighting = 'size': must be 'uniform' or 'examples'",
    "seed=-1": "seed = -1: must be greater than or equal to 0",
    "seed.x=1": "--set = 'seed.x=1': seed is a single value, not a section",
    "target=90": "target = 90: must be less than or equal to 1",
    "split.clients=100000": "split.clients = 100000: needs 200000 samples at least",
    "split.kind=random": "split.kind = 'random': must be 'iid', 'shards', 'classes', 'dirichlet'",
    "split={kind='file', clients=3}": "split.file = None: is needed by kind = 'file'",
    "split={kind='iid'}": "split.clients = None: is missing and must be given",
    "split={kind='file', file='x', allocation='per_round'}": "allocation = 'per_round': cannot",
    "split={kind='file', file='x.json'}": "split.file = 'x.json': cannot be read",
    "split={kind='column', column='who'}": "split.column = 'who': is not there",
    "split={kind='classes', clients=5, per_client=11}": "split.per_client = 11: must be at most 10",
    "model.name=cnm": "model.name = 'cnm': is unknown; did you mean 'cnn'?",
    "model.name=cnn": "model.name = 'cnn': needs 16×16 pixels, not 8×8",
    "model.name=nowhere:build": "model.name = 'nowhere:build': cannot be imported",
    "model.name=math:sin": "model.name = 'math:sin': must take (shape, classes)",
    "model.name=os.path:join": "model.name = 'os.path:join': must take (shape, classes)",
    "model.precision=fp16": "model.precision = 'fp16': must be 'float32' or 'bf16'",
    "data.validation=1": "data.validation = 1: must be less than 1",
    "model.hidden=[0]": "model.hidden.0 = 0: must be greater than or equal to 1",
    "data.name=digts": "data.name = 'digts': is unknown; did you mean 'digits'?",
    "algorithms.fed-lamb.lr=-1": "algorithms.fed-lamb.lr = -1: must be a positive number",
    "algorithms.fed-lamb.lr=fast": "algorithms.fed-lamb.lr = 'fast': must be a positive number",
    "algorithms.fed-lamb.beta=0.9": "algorithms.fed-lamb.beta = 0.9: is no setting; did you mean",
    "algorithms.fed-sgd.beta1=0.9": "[algorithms.fed-sgd] takes lr, schedule",
    "algorithms.fed-lamp.lr=1": "method = 'fed-lamp': is unknown; did you mean 'fed-lamb'?",
    "algorithms.fed-lamb.schedule=30": "algorithms.fed-lamb.schedule = 30: must be a table such",
    "algorithms.fed-sgd.schedule={at=[3]}": "schedule.at = [3]: is no setting",
    "rounds=9": "rounds = 9: is no setting; did you mean 'federation.rounds'?",
    "lr=0.1": "lr = 0.1: is no setting; did you mean 'algorithms.METHOD.lr'?",
    "federation=3": "federation = 3: must be a section with rounds, fraction",
    "seed=99999999999999999999": "seed = 99999999999999999999: must be less than",
    "algorithms.fed-sgd.schedule={after=30}": "schedule.after = 30: must be round numbers",
    "algorithms.fed-sgd.schedule={}": "schedule.after = None: must be given",
    'algorithms.fed-sgd.schedule={after=[1], factor="a"}': "schedule.factor = 'a': must be",
    "rounds": "--set = 'rounds': must be KEY=VALUE",
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.items(), ids=MISTAKES.keys())
def test_mistakes_are_told_in_one_sentence(change, message):
    with pytest.raises(fl.SettingError, match=re.escape(message)) as caught:
        build_run(load_experiment("digits", [change]), "fed-lamb")
    assert "\n" not in str(caught.value)


def test_a_missing_setting_is_named():
    table = tomllib.loads(PRESET.read_text())
    del table["federation"]["rounds"]
    with pytest.raises(fl.SettingError, match=r"federation.rounds = None: is missing"):
        validate(table)
    table = tomllib.loads(PRESET.read_text())
    del table["algorithms"]["adp-fed"]["server_lr"]
    with pytest.raises(
        fl.SettingError, match=r"algorithms.adp-fed.server_lr = None: must be given"
    ):
        validate(table)


def test_a_file_that_is_no_toml_is_told(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("rounds = = 3")
    with pytest.raises(fl.SettingError, match="preset = .*: cannot be read"):
        load_experiment(str(path))
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(fl.SettingError, match="holds no settings"):
        load_experiment(str(tmp_path / "list.json"))
    with pytest.raises(fl.SettingError, match="cannot be read; .*No such file"):
        load_experiment(str(tmp_path / "none.toml"))
    with pytest.raises(
        fl.SettingError, match="preset = 'digit': is unknown; did you mean 'digits'"
    ):
        load_experiment("digit")


def test_a_title_tells_of_other_data_than_the_presets() -> None:
    plain = load_experiment("mnist-mlp-iid", ["federation.rounds=3", "data.root=/x"])
    assert plain.title == load_experiment("mnist-mlp-iid").title != ""
    other = load_experiment("mnist-mlp-iid", ["data.name=fashion_mnist", "model.hidden=[9]"])
    assert other.title == f"{plain.title}, but data.name=fashion_mnist, model.hidden=[9]"
    own = load_experiment("mnist-mlp-iid", ["data.name=fashion_mnist", "title=Mine"])
    assert own.title == "Mine"
