"""The floor of W1: its matrix products alone, on numbers that lie ready, and nothing else.

Per step: two forward products, two for the gradients of the weights, one for the gradient of the
hidden layer; then the two products of the test pass. No batch is gathered, no bias, activation,
loss, update or mean is computed, so no accuracy is reported. Run as two processes of one thread
that share the steps, and as one process of two threads, by torch's own product (MKL) and by
oneDNN's; the way with the fastest median is reported, and the medians of all.
"""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import median

import torch
import workload

STEPS = [128] * 9 + [48]
TEST = 10_000


def by_mkl(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """torch's own product."""
    torch.mm(a, b, out=out)


def by_onednn(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """By oneDNN where that pays; the memory of `out` stays unused."""
    if a.shape[0] * a.shape[1] * b.shape[1] < 2**20:
        by_mkl(a, b, out)
    else:
        torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")


LIBRARIES = {"MKL": by_mkl, "oneDNN": by_onednn}


def products(library: str, share: int, of: int) -> Callable[[], None]:
    """Every `of`-th step of a round and that part of the test pass, as one call."""
    mm = LIBRARIES[library]
    draw = torch.Generator().manual_seed(share)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    steps = (STEPS * workload.COHORT)[share::of]
    batches = normal(sum(steps), 784).split(steps)
    w1, w2 = normal(200, 784), normal(10, 200)
    g1, g2 = torch.empty_like(w1), torch.empty_like(w2)
    buffers = {
        rows: (normal(rows, 200), normal(rows, 10), normal(rows, 200)) for rows in set(steps)
    }
    test = normal(TEST // of, 784).split(1000)
    hidden, logits = normal(1000, 200), normal(1000, 10)

    def run() -> None:
        for x in batches:
            h, o, dh = buffers[len(x)]
            mm(x, w1.T, h)
            mm(h, w2.T, o)
            mm(o.T, h, g2)
            mm(o, w2, dh)
            mm(dh.T, x, g1)
        for x in test:
            mm(x, w1.T, hidden)
            mm(hidden, w2.T, logits)

    return run


def timed(
    library: str, share: int, of: int, threads: int, rounds: int, together: Barrier, found: Queue
) -> None:
    """One process: each round begins and ends with all of them together."""
    torch.set_num_threads(threads)
    run = products(library, share, of)
    seconds = []
    for _ in range(rounds):
        together.wait()
        begun = time.perf_counter()
        run()
        together.wait()
        seconds.append(time.perf_counter() - begun)
    found.put(seconds)


def measure(library: str, processes: int, threads: int, rounds: int) -> list[float]:
    """Seconds of each round; the slowest process counts."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(processes), context.Queue()
    started = [
        context.Process(
            target=timed, args=(library, i, processes, threads, rounds, together, found)
        )
        for i in range(processes)
    ]
    for process in started:
        process.start()
    measured = [found.get() for _ in started]
    for process in started:
        process.join()
    return [max(round) for round in zip(*measured, strict=True)]


def main() -> None:
    """Runs all ways and reports the fastest."""
    args = workload.arguments()
    if args.workload != "W1":
        raise SystemExit("floor: only W1 has one")
    ways = {
        f"{library}, {processes} of {threads}": measure(library, processes, threads, args.rounds)
        for library in LIBRARIES
        for processes, threads in ((2, 1), (1, 2))
    }
    medians = {way: median(seconds[1:]) for way, seconds in ways.items()}
    workload.report(ways[min(medians, key=medians.__getitem__)], [], medians=medians)


if __name__ == "__main__":
    main()
