"""Loop and vectorised on a GPU: the same trajectory over 10 rounds, all six methods.

    python tests/gpu/check_executors.py [--jobs 8 | kernels "smooth ragged Mime" "mlp sweep" ...]

First the kernels of stacked models alone, against torch's in float64. Then trajectories: float64 to
1e-9 against the CPU's loop, ragged clients included; float32 to rounding, for models
without max-pooling: there, rounding at times decides which pixel is the largest, and such a flip
moves a trajectory by far more than rounding, on a CPU as well. The loop and the vectorised
executor both replay CUDA graphs here.
"""

import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "src"))

from torch import nn
from torch.nn import functional as F  # noqa: N812

import fedlamb as fl
from fedlamb.simulate.stacked import pooled, product_kernels
from fedlamb.simulate.stacked.convolution import (
    as_torch_has_them,
    channels_last,
    correlate,
    input_gradient,
    weight_gradient,
)
from fedlamb.tasks.models import build_model

METHODS = [
    fl.FedSGD(lr=0.1),
    fl.AdpFed(lr=0.1, server_lr=0.05),
    fl.FedAMS(lr=0.003),
    fl.FedLAMB(lr=0.03, weight_decay=0.01),
    fl.Mime(lr=0.0003, sync_every=3),
    fl.MimeLAMB(lr=0.03, layers="module"),
]


def smooth():
    """A convolutional network without kinks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 10, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(10, 20, 3, stride=2, padding=1), nn.Tanh(),
            nn.Flatten(), nn.Linear(20 * 3 * 3, 4),
        )  # fmt: skip


def large():
    """A network of a million parameters, of which a GPU runs six clients side by side."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(256, 4200), nn.Tanh(), nn.Linear(4200, 4))


def task_of(model, device, dtype):
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (240, 1, 16, 16), generator=draw, dtype=torch.uint8)
    y = torch.arange(240) % 4
    module = copy.deepcopy(model).to(device, dtype)
    return fl.Task(module, (x, y), (x, y), inputs=fl.Images((120.0,), (60.0,), crop=2))


def start(method, task, executor, clients, compile=False):
    return fl.fit(
        method, task, clients=clients, rounds=10, batch_size=16, fraction=0.5,
        executor=executor, compile=compile,
    )  # fmt: skip


def check_convolutions():
    """Forward and both gradients, of sizes that fill no tile."""
    draw = torch.Generator().manual_seed(0)
    for tf32, tolerance in ((True, 5e-3), (False, 5e-6)):
        torch.backends.cudnn.allow_tf32 = tf32
        worst = 0.0
        for n, c, h, w, o, down, across, stride in (
            (7, 1, 28, 28, 10, 5, 5, 1),
            (5, 10, 12, 12, 20, 5, 5, 1),
            (3, 20, 9, 8, 40, 3, 2, 2),
            (2, 33, 7, 7, 70, 1, 1, 1),
        ):
            images = torch.randn(3, n, c, h, w, generator=draw, dtype=torch.float64)
            weights = torch.randn(3, o, c, down, across, generator=draw, dtype=torch.float64)
            x, k = (t.clone().requires_grad_() for t in (images, weights))
            y = torch.stack([F.conv2d(a, b, stride=stride) for a, b in zip(x, k, strict=True)])
            dy = torch.randn(y.shape, generator=draw, dtype=torch.float64)
            y.backward(dy)
            xs, ks, dys = (t.float().cuda() for t in (images, weights, dy))
            xs, dys = channels_last(xs), channels_last(dys)
            pairs = [
                (correlate(xs, ks, stride, 0, 0), y),
                (weight_gradient(xs, dys, down, across, stride, 0, 0), k.grad),
            ]
            if stride == 1:
                pairs.append((input_gradient(dys, ks, 0, 0), x.grad))
            for found, expected in pairs:
                found = as_torch_has_them(found) if expected is not k.grad else found
                worst = max(worst, gap(found, expected))
        print(f"convolutions, allow_tf32={tf32}: {worst:.1e} of the largest")
        assert worst < tolerance, worst


def gap(found, expected):
    """The largest difference, as a share of the largest number."""
    expected = expected.detach()
    found = float((found.cpu().double() - expected).abs().max() / expected.abs().max())
    assert found == found, "no number"
    return found


def check_pool():
    """A convolution with its pool; which pixel is the largest must not hang on rounding."""
    draw = torch.Generator().manual_seed(0)
    worst = 0.0
    for n, c, side, o, kernel, padding in ((5, 1, 28, 10, 5, 0), (3, 3, 11, 17, 3, 1)):
        x = torch.randn(3, n, c, side, side, generator=draw, dtype=torch.float64)
        k = torch.randn(3, o, c, kernel, kernel, generator=draw, dtype=torch.float64)
        k.requires_grad_()
        each = [F.conv2d(a, b, padding=padding) for a, b in zip(x, k, strict=True)]
        y = torch.stack([F.max_pool2d(a, 2) for a in each])
        dy = torch.randn(y.shape, generator=draw, dtype=torch.float64)
        y.backward(dy)
        xs, ks, dys = (t.detach().float().cuda() for t in (x, k, dy))
        found, places = pooled.pooled(channels_last(xs), ks, padding, padding)
        by_k = pooled.weight_gradient(
            channels_last(xs), channels_last(dys), places, kernel, kernel, padding, padding
        )
        worst = max(worst, gap(as_torch_has_them(found), y), gap(by_k, k.grad))
    print(f"convolutions with their pools: {worst:.1e} of the largest")
    assert worst < 5e-6, worst


def check_products():
    """Products of stacked matrices, of sizes that fill no tile."""
    draw = torch.Generator().manual_seed(0)
    worst = 0.0
    for m, k, n in ((128, 784, 200), (200, 128, 784), (128, 200, 10), (7, 50, 33)):
        turned = torch.randn(5, k, m, generator=draw, dtype=torch.float64).mT
        b = torch.randn(5, k, n, generator=draw, dtype=torch.float64)
        for a in (turned, turned.contiguous()):
            found = product_kernels.product(a.float().cuda(), b.float().cuda())
            worst = max(worst, gap(found, a @ b))
    print(f"products: {worst:.1e} of the largest")
    assert worst < 5e-6, worst


def check_compiled(name, model):
    """Compiled steps of stacked models against those as they are: losses and parameters after four
    rounds, so few that no pool's largest pixel is another by rounding."""
    clients = fl.iid(240, 8)
    worst = 0.0
    for method in (fl.FedSGD(lr=0.003), fl.FedLAMB(lr=0.0003), fl.Mime(lr=0.00001)):
        plain, compiled = (
            fl.fit(method, task_of(model, "cuda", torch.float32), clients=clients, rounds=4,
                   batch_size=16, executor="vectorised", compile=compile)
            for compile in (False, True)
        )  # fmt: skip
        for one, two in zip(plain, compiled, strict=True):
            worst = max(worst, abs(one.metrics["train_loss"] - two.metrics["train_loss"]))
        for key, value in plain.params.items():
            worst = max(worst, gap(compiled.params[key], value.cpu().double()))
    print(f"{name}, compiled, 4 rounds: {worst:.1e}", flush=True)
    assert worst < 2e-3, worst


def leave_rubbish():
    """Freed memory that is no number, in blocks of all sizes: who reads too early will show it."""
    for size in (2**k for k in range(8, 24)):
        kept = [torch.full((size,), float("nan"), device="cuda") for _ in range(16)]
        torch.cuda.synchronize()
        del kept


def check_sharing(model, clients):
    """Runs side by side on shared programs, and the same run twice: the same bits as alone."""
    for method in (fl.FedSGD(lr=0.003), fl.FedLAMB(lr=0.001), fl.Mime(lr=0.00001)):
        for compile in (False, True):
            leave_rubbish()
            options = (task_of(model, "cuda", torch.float32), "loop", clients, compile)
            other = replace(method, lr=2 * method.lr)
            first, sharing = start(method, *options), start(other, *options)
            assert sharing.share_programs(first)
            for _ in range(10):
                next(first), next(sharing)
            for run, again in ((first, start(method, *options)), (sharing, start(other, *options))):
                list(again)
                same = all(torch.equal(run.params[key], again.params[key]) for key in run.params)
                assert same, (method, compile)
        print(f"large  shared {type(method).__name__:9} the same bits", flush=True)


def check_sweep(name, model, clients):
    """A grid with two seeds as one program against separate runs of the loop."""
    for usual in METHODS:
        method = replace(usual, lr=usual.lr / 3)
        said = []
        for dtype, tolerance in BOTH:
            options = {"clients": clients, "rounds": 10, "batch_size": 16, "fraction": 0.5}
            task = task_of(model, "cuda", dtype)
            grid = {"lr": [method.lr, 2 * method.lr]}
            together = fl.sweep(method, task, grid=grid, seeds=(0, 1), **options)
            for _ in together:
                pass
            worst = 0.0
            for values, seed, run in together.points:
                alone = fl.fit(
                    replace(method, **values), task, seed=seed, executor="loop", **options
                )
                list(alone)
                gaps = [gap(run.params[n], p.double().cpu()) for n, p in alone.params.items()]
                worst = max(worst, *gaps)
            said.append(f"{str(dtype)[6:]} {worst:.1e}")
            assert worst < tolerance, (method, worst)
        print(f"{name:6} sweep  {type(method).__name__:9} {', '.join(said)}", flush=True)


BOTH = ((torch.float64, 1e-9), (torch.float32, 2e-3))
EQUAL = fl.iid(240, 8)
RAGGED = fl.dirichlet(torch.arange(240) % 4, 8, 0.5, balanced=False)
MODELS = {
    "mlp": (build_model("mlp", (1, 16, 16), 4, hidden=[20]), BOTH),
    "cnn": (build_model("cnn", (1, 16, 16), 4), BOTH[:1]),
    "smooth": (smooth(), BOTH),
    "large": (large(), BOTH),
}


def check_trajectory(name, split, usual):
    """The loop on a CPU, on the GPU, vectorised, and compiled where that is for the model."""
    model, kinds = MODELS[name]
    clients = EQUAL if split == "equal" else RAGGED
    # At the usual rates the large model's loss explodes, and rounding with it.
    rates = ("lr", "server_lr") if name == "large" else ()
    method = replace(usual, **{n: getattr(usual, n) / 30 for n in rates if hasattr(usual, n)})
    said = []
    for dtype, tolerance in kinds:
        leave_rubbish()
        runs = [
            start(method, task_of(model, device, dtype), executor, clients)
            for executor, device in (("loop", "cpu"), ("loop", "cuda"), ("vectorised", "cuda"))
        ]
        if name == "large":
            runs.append(start(method, task_of(model, "cuda", dtype), "loop", clients, compile=True))
        found = [[r.metrics["train_loss"] for r in run] for run in runs]
        worst = 0.0
        for other, losses in zip(runs[1:], found[1:], strict=True):
            for one, two in zip(found[0], losses, strict=True):
                worst = max(worst, abs(one - two) / abs(one))
            gaps = [gap(other.params[n], p.double()) for n, p in runs[0].params.items()]
            worst = max(worst, *gaps)
        said.append(f"{str(dtype)[6:]} {worst:.1e}")
        assert worst < tolerance, (name, split, method, worst)
    print(f"{name:6} {split:6} {type(method).__name__:9} {', '.join(said)}", flush=True)


def check_kernels():
    """Of stacked models, and steps compiled around them."""
    check_convolutions()
    torch.backends.cudnn.allow_tf32 = False
    check_pool()
    check_products()
    check_compiled("cnn", build_model("cnn", (1, 16, 16), 4))
    check_compiled("mlp", build_model("mlp", (1, 16, 16), 4))


CHECKS = {
    "kernels": check_kernels,
    **{
        f"{name} {split} {type(usual).__name__}": partial(check_trajectory, name, split, usual)
        for name in MODELS
        for split in ("equal", "ragged")
        for usual in METHODS
    },
    **{f"{n} sweep": partial(check_sweep, n, MODELS[n][0], EQUAL) for n in ("mlp", "smooth")},
    "large shared": partial(check_sharing, MODELS["large"][0], EQUAL),
}


def in_processes(count):
    """Each with some of the checks; prints what they print, and says whether all hold."""
    names = [*CHECKS]
    some = [
        subprocess.Popen(
            [sys.executable, __file__, *names[number::count]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(count)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in some]
    print("".join(said), end="")
    return all(process.returncode == 0 for process in some)


def main():
    given = sys.argv[1:]
    if given[:1] == ["--jobs"]:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        if not in_processes(int(given[1])):
            raise SystemExit("some do not hold")
        print(f"all {len(CHECKS)} hold")
        return
    torch.backends.cudnn.allow_tf32 = False
    for name in given or CHECKS:
        CHECKS[name]()


if __name__ == "__main__":
    main()
