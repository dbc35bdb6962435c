"""Models: the counts that SPEC and the paper state, seeds, precision, one's own."""

import pytest
import torch

import fedlamb as fl
from fedlamb.experiment import build_run
from fedlamb.settings import load_experiment
from fedlamb.tasks.models import build_model

COUNTS = {
    ("mlp", (1, 28, 28), 10, "batch"): 159_010,
    ("cnn", (1, 28, 28), 10, "batch"): 21_840,
    ("resnet18", (3, 32, 32), 10, "batch"): 11_173_962,
    ("resnet18", (3, 32, 32), 10, "group"): 11_173_962,
    ("resnet18", (3, 64, 64), 200, "batch"): 11_173_962 + 190 * 513,
    ("vit", (3, 32, 32), 10, "batch"): 2_693_194,
}


@pytest.mark.parametrize(("key", "count"), COUNTS.items(), ids=lambda k: str(k))
def test_parameter_counts_and_outputs(key, count):
    name, shape, classes, norm = key
    model = build_model(name, shape, classes, norm=norm)
    assert sum(p.numel() for p in model.parameters()) == count
    with torch.no_grad():
        assert model.eval()(torch.zeros(2, *shape)).shape == (2, classes)
    buffers = dict(model.named_buffers())
    assert bool(buffers) == (name == "resnet18" and norm == "batch")


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (3, 32, 32)), ("vit", (1, 28, 28)), ("vit", (3, 64, 64))]
)
def test_other_sizes_fit_too(name, shape):
    model = build_model(name, shape, 7)
    with torch.no_grad():
        assert model.eval()(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["mlp", "cnn", "vit", "my_models:build"])
def test_a_seed_decides_the_start(name):
    one, two, other = (build_model(name, (1, 28, 28), 10, seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)


def test_resnet_is_the_usual_one():
    """Eight blocks of two convolutions, three of them halve the image with a 1×1 shortcut."""
    model = build_model("resnet18", (3, 32, 32), 10)
    assert isinstance(model, fl.ResNet18)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 1 + 16 + 3
    assert [c.kernel_size for c in convolutions].count((1, 1)) == 3
    assert model.conv.stride == (1, 1)
    with torch.no_grad():
        assert model.eval().blocks(torch.zeros(1, 64, 32, 32)).shape == (1, 512, 4, 4)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_batch_norm_model_trains_in_either_precision(precision):
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(12) % 2
    x = torch.randint(128, (12, 3, 8, 8), generator=draw, dtype=torch.uint8)
    x += (100 * y).to(torch.uint8)[:, None, None, None]  # something to learn
    task = fl.Task(
        build_model("resnet18", (3, 8, 8), 2),
        (x, y),
        (x, y),
        inputs=fl.Images((127.0,) * 3, (74.0,) * 3, crop=1),
        precision=precision,
    )
    run = fl.fit(fl.FedLAMB(lr=0.01), task, clients=fl.iid(12, 2), rounds=4, batch_size=3)
    losses = [r.metrics["train_loss"] for r in run]
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.dtype == torch.float32 for p in run.params.values())
    assert int(run.buffers["norm.num_batches_tracked"]) == 8


def test_bf16_is_near_float32_but_not_the_same():
    losses = {}
    for precision in ("float32", "bf16"):
        run = build_run(load_experiment("digits", [f"model.precision={precision}"]), "fed-lamb")
        losses[precision] = next(run).metrics["train_loss"]
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bf16"] != losses["float32"]


def test_one_s_own_model_by_import_path():
    run = build_run(load_experiment("digits", ["model.name=my_models:build"]), "fed-sgd")
    assert next(run).metrics["test_accuracy"] > 0.2
    with pytest.raises(fl.SettingError, match="must return an nn.Module"):
        build_run(load_experiment("digits", ["model.name=my_models:no_model"]), "fed-sgd")
