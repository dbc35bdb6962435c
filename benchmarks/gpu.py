"""One round of 25 clients on a GPU: MLP, CNN and ResNet-18 under Fed-LAMB, beside an eager loop.

    python benchmarks/gpu.py [--only mlp,cnn,resnet18,sweep] [--profile] [--log FILE]

MLP and CNN: 19 steps of 128 MNIST-sized images per client; ResNet-18: 16 steps of 128
CIFAR-sized images in bf16. Random pixels. A round is timed from the call to the synchronised end,
planning and server update included, and the evaluation of 128 examples. The sweep is 9 rates and
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

import torch

import fedlamb as fl
from fedlamb.local_round import local_round
from fedlamb.simulate.loop import Autograd
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
    results = []
    for name in given.only.split(","):
        if name == "sweep":
            seconds = sweep()
            results.append({"model": "cnn", "how": "sweep of 27, compiled", "seconds": seconds})
            print(
                f"sweep of 27 CNN federations, 50 rounds: {sum(seconds):.1f} s in all", flush=True
            )
            continue
        repeats = WORK[name][3]
        executor = "loop" if name == "resnet18" else "vectorised"
        for compile in (False,) if given.plain else (False, True):
            run = federation(name, executor, compile)
            torch.cuda.reset_peak_memory_stats()
            seconds = timed(lambda run=run: next(run), repeats, warm=3)
            memory = torch.cuda.max_memory_allocated() / 2**30
            how = f"{executor}, compiled" if compile else executor
            results.append({"model": name, "how": how, "seconds": seconds, "GiB": memory})
            print(
                f"{name:9} {how:21} {1e3 * statistics.median(seconds):9.2f} ms "
                f"(n = {repeats}, {1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f}) "
                f"{memory:.2f} GiB",
                flush=True,
            )
            if given.profile:
                python = cProfile.Profile()
                python.runcall(next, run)
                pstats.Stats(python).sort_stats("tottime").print_stats(25)
                with torch.profiler.profile() as profile:
                    next(run)
                    torch.cuda.synchronize()
                print(
                    profile.key_averages().table(
                        sort_by="cuda_time_total", row_limit=14, max_name_column_width=70
                    )
                )
            del run
            torch.cuda.empty_cache()
        seconds = timed(eager_loop(name), 2, warm=1)
        results.append({"model": name, "how": "eager loop", "seconds": seconds})
        print(
            f"{name:9} {'eager loop':21} {1e3 * statistics.median(seconds):9.2f} ms (n = 2)",
            flush=True,
        )
    if given.log:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        given.log.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
