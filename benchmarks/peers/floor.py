"""The floor of W1: its matrix products alone, on numbers that lie ready, and nothing else.

Per step: two forward products, two for the gradients of the weights, one for the gradient of the
hidden layer; then the two products of the test pass. No batch is gathered, no bias, activation,
loss, update or mean is computed, so no accuracy is reported. Run as two processes of one thread
that share the steps, and as one process of two threads; the one with the faster median is
reported.
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


def products(share: int, of: int) -> Callable[[], None]:
    """Every `of`-th step of a round and that part of the test pass, as one call."""
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
            torch.mm(x, w1.T, out=h)
            torch.mm(h, w2.T, out=o)
            torch.mm(o.T, h, out=g2)
            torch.mm(o, w2, out=dh)
            torch.mm(dh.T, x, out=g1)
        for x in test:
            torch.mm(x, w1.T, out=hidden)
            torch.mm(hidden, w2.T, out=logits)

    return run


def timed(share: int, of: int, threads: int, rounds: int, together: Barrier, found: Queue) -> None:
    """One process: each round begins and ends with all of them together."""
    torch.set_num_threads(threads)
    run = products(share, of)
    seconds = []
    for _ in range(rounds):
        together.wait()
        begun = time.perf_counter()
        run()
        together.wait()
        seconds.append(time.perf_counter() - begun)
    found.put(seconds)


def measure(processes: int, threads: int, rounds: int) -> list[float]:
    """Seconds of each round; the slowest process counts."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=timed, args=(i, processes, threads, rounds, together, found))
        for i in range(processes)
    ]
    for process in started:
        process.start()
    measured = [found.get() for _ in started]
    for process in started:
        process.join()
    return [max(round) for round in zip(*measured, strict=True)]


def main() -> None:
    """Runs both ways and reports the faster."""
    args = workload.arguments()
    if args.workload != "W1":
        raise SystemExit("floor: only W1 has one")
    both = [measure(2, 1, args.rounds), measure(1, 2, args.rounds)]
    workload.report(min(both, key=median), [])


if __name__ == "__main__":
    main()
