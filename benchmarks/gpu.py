"""One round of 25 clients on a GPU: MLP, CNN and ResNet-18 under Fed-LAMB, beside an eager loop.

    python benchmarks/gpu.py [--only mlp,cnn,resnet18,sweep] [--plain] [--profile] [--log FILE]

MLP and CNN: 19 steps of 128 MNIST-sized images per client; ResNet-18: 16 steps of 128
CIFAR-sized images in bf16. Random pixels. A round is timed from the call to the synchronised end,
planning and server update included, and the evaluation of 128 examples; "in a row", 20 rounds are
timed together, as in a run, where nobody waits for the device after each. The eager loop runs the
same client rounds one after another without graphs; the floor is the products of matrices and the
convolutions of such a round alone, forward and backward, on numbers that lie ready, as one graph:
no batch, bias, activation, norm, loss, update or mean. The sweep is 9 rates and
3 seeds of the CNN, 25 clients each, 50 rounds, from start to end with compilation.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fedlamb as fl
from fedlamb.local_round import local_round
from fedlamb.reproduce.results import revision
from fedlamb.simulate.loop import Autograd
from fedlamb.simulate.stacked import pooled
from fedlamb.simulate.stacked.convolution import correlate, input_gradient, weight_gradient
from fedlamb.simulate.work import assignments
from fedlamb.tasks.images import Batch
from fedlamb.tasks.models import build_model

CLIENTS = 25
WORK = {
    "mlp": ((1, 28, 28), 19, "float32", 20),
    "cnn": ((1, 28, 28), 19, "float32", 20),
    "resnet18": ((3, 32, 32), 16, "bf16", 5),
}


def federation(name: str, executor: str, compile: bool = False) -> fl.Run:
    """The workload as a run."""
    shape, steps, precision, _ = WORK[name]
    draw = torch.Generator().manual_seed(0)
    rows = CLIENTS * steps * 128
    x = torch.randint(256, (rows, *shape), generator=draw, dtype=torch.uint8)
    y = torch.randint(10, (rows,), generator=draw)
    crop = 4 if shape[0] == 3 else 0
    task = fl.Task(
        build_model(name, shape, 10).cuda(),
        (x, y),
        (x[:128], y[:128]),
        inputs=fl.Images((128.0,) * shape[0], (74.0,) * shape[0], crop=crop),
        precision=precision,
    )
    return fl.fit(
        fl.FedLAMB(lr=0.001),
        task,
        clients=fl.iid(rows, CLIENTS),
        rounds=10**6,
        batch_size=128,
        executor=executor,
        compile=compile,
    )


def sweep(rounds: int = 50) -> list[float]:
    """Seconds of each round of 27 federations together."""
    one = federation("cnn", "vectorised")
    rates = [0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5]
    trials = fl.sweep(
        fl.FedLAMB(lr=0.001),
        one.task,
        grid={"lr": rates},
        seeds=(0, 1, 2),
        compile=True,
        clients=one.plan.clients,
        rounds=rounds,
        batch_size=128,
    )
    return timed(lambda: next(trials), rounds, warm=0)


def eager_loop(name: str) -> Callable[[], None]:
    """The same client rounds one after another, no graph."""
    run = federation(name, "loop")
    gradients = Autograd(run.task)
    work = assignments(run.plan, 2, run.task.augments, "uniform")
    next(run)
    sent = run.algorithm.broadcast(run.server)

    def once() -> None:
        for each in work:
            batches = [
                Batch(*(p if p is None else p.cuda() for p in batch)) for batch in each.batches()
            ]
            state = run.store.state(each.client)
            data = Batch(each.rows.cuda())
            local_round(run.algorithm, gradients, state, sent, run.buffers, data, batches)

    return once


def floor(name: str) -> Callable[[], None]:
    """The products of a round alone."""
    _, steps, _, _ = WORK[name]
    if name == "resnet18":
        one, times = _one_by_one(), CLIENTS * steps
    else:
        one, times = (_stacked_mlp() if name == "mlp" else _stacked_cnn()), steps
    one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            one()

    def once() -> None:
        for _ in range(times // steps):
            graph.replay()

    return once


def _linear(inputs: int, outputs: int, first: bool) -> Callable[[], None]:
    x, w, dy = (
        torch.randn(CLIENTS, *shape, device="cuda")
        for shape in ((128, inputs), (outputs, inputs), (128, outputs))
    )

    def products() -> None:
        torch.bmm(x, w.mT)
        torch.bmm(dy.mT, x)
        if not first:
            torch.bmm(dy, w)

    return products


def _stacked_mlp() -> Callable[[], None]:
    layers = [_linear(784, 200, first=True), _linear(200, 10, first=False)]
    return lambda: [layer() for layer in layers] and None


def _stacked_cnn() -> Callable[[], None]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(CLIENTS, *shape, device="cuda")

    x1, w1, y1 = normal(128, 28, 28, 1), normal(10, 1, 5, 5), normal(128, 12, 12, 10)
    x2, w2, y2 = normal(128, 12, 12, 10), normal(20, 10, 5, 5), normal(128, 8, 8, 20)
    linear = [_linear(320, 50, first=False), _linear(50, 10, first=False)]

    def products() -> None:
        _, places = pooled.pooled(x1, w1, 0, 0)
        pooled.weight_gradient(x1, y1, places, 5, 5, 0, 0)
        correlate(x2, w2, 1, 0, 0)
        weight_gradient(x2, y2, 5, 5, 1, 0, 0)
        input_gradient(y2, w2, 0, 0)
        for layer in linear:
            layer()

    return products


def _one_by_one() -> Callable[[], None]:
    """The convolutions of one ResNet-18, in bf16, channels last."""
    model = build_model("resnet18", (3, 32, 32), 10).cuda()
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], list[int]]] = []

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        ready = [
            t.detach().to(torch.bfloat16, memory_format=torch.channels_last)
            for t in (inputs[0], module.weight, output)
        ]
        found.append((*ready, list(module.stride), list(module.padding)))

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.randn(128, 3, 32, 32, device="cuda"))

    def products() -> None:
        for number, (x, w, y, stride, padding) in enumerate(found):
            torch.nn.functional.conv2d(x, w, None, stride, padding)
            torch.ops.aten.convolution_backward(
                *(y, x, w, None, stride, padding, [1, 1], False, [0, 0], 1),
                [number > 0, True, False],
            )

    return products


def timed(once: Callable[[], object], repeats: int, warm: int) -> list[float]:
    """Seconds of each repeat."""
    found = []
    for number in range(warm + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        once()
        torch.cuda.synchronize()
        if number >= warm:
            found.append(time.perf_counter() - start)
    return found


def main() -> None:
    """Times every workload, prints a table, writes the log."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default=",".join([*WORK, "sweep"]))
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--plain", action="store_true", help="without compilation")
    arguments.add_argument("--log", type=Path)
    given = arguments.parse_args()
    results: list[dict[str, Any]] = []

    def note(name: str, how: str, seconds: list[float]) -> None:
        memory = torch.cuda.max_memory_allocated() / 2**30
        results.append({"model": name, "how": how, "seconds": seconds, "GiB": memory})
        low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
        spread = f"(n = {len(seconds)}, {low:.2f} to {high:.2f})"
        print(f"{name:9} {how:30} {middle:9.2f} ms {spread} {memory:.2f} GiB", flush=True)
        if given.log:
            gpu = torch.cuda.get_device_name()
            facts = {"gpu": gpu, "torch": torch.__version__, "revision": revision()}
            given.log.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    for name in given.only.split(","):
        if name == "sweep":
            seconds = sweep()
            note("cnn", "sweep of 27, compiled", seconds)
            print(f"sweep of 27 CNN federations, 50 rounds: {sum(seconds):.1f} s in all")
            continue
        repeats = WORK[name][3]
        note(name, "floor", timed(floor(name), repeats, warm=2))
        note(name, "eager loop", timed(eager_loop(name), 2, warm=1))
        executor = "loop" if name == "resnet18" else "vectorised"
        for compile in (False,) if given.plain else (False, True):
            run = federation(name, executor, compile)
            seconds = timed(lambda run=run: next(run), repeats, warm=3)
            how = f"{executor}, compiled" if compile else executor
            note(name, how, seconds)
            if executor == "vectorised":
                twenty = timed(lambda run=run: [next(run) for _ in range(20)], repeats=10, warm=1)
                note(name, f"{how}, in a row", [s / 20 for s in twenty])
            if given.profile:
                show_profile(run)
            del run


def show_profile(run: fl.Run) -> None:
    """Time in Python, of twenty rounds in a row, and one round kernel by kernel."""
    python = cProfile.Profile()
    python.runcall(lambda: [next(run) for _ in range(20)])
    for order in ("tottime", "cumtime"):
        pstats.Stats(python).sort_stats(order).print_stats(30)
    with torch.profiler.profile() as profile:
        next(run)
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda k: -k.self_device_time_total)
    print(f"{sum(k.self_device_time_total for k in kernels) / 1e3:10.2f} ms in kernels")
    for k in kernels[:25]:
        print(f"{k.self_device_time_total / 1e3:10.2f} ms {k.count:7} times  {k.key[:90]}")


if __name__ == "__main__":
    main()
