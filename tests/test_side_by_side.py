"""Trials side by side: the same results as one by one, and nothing lost or left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedlamb.reproduce.side_by_side import Job, Workers
from fedlamb.reproduce.trials import Bench
from fedlamb.settings import Experiment, validate
from fedlamb.simulate.crew import CrewError
from fedlamb.simulate.sweep import Together


def experiment(rounds: int, **federation: Any) -> Experiment:
    return validate(
        {
            "data": {"name": "digits"},
            "split": {"kind": "shards", "clients": 8, "per_client": 2},
            "model": {"name": "mlp", "hidden": [8]},
            "federation": {"rounds": rounds, "fraction": 0.5, "batch_size": 32, **federation},
            "engine": {"device": "cpu"},
            "algorithms": {"fed-ams": {"lr": 0.01}},
        }
    )


def jobs(folder: Path, rates: list[float], rounds: int = 4, epochs: int = 1) -> list[Job]:
    each = experiment(rounds, epochs=epochs)
    return [Job("fed-ams", {"lr": lr}, each, folder / str(i)) for i, lr in enumerate(rates)]


def nobody(*now: Any) -> None:
    """Progress that nobody watches."""


def without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_they_give_what_one_process_gives_and_say_how_far_they_are(tmp_path: Path) -> None:
    rates = [0.001, 0.01, 0.03, 1e30]  # the last one diverges
    told: list[tuple[Any, ...]] = []
    with Workers(2) as workers:
        given = jobs(tmp_path / "two", rates)
        found = dict(workers.run(given, lambda *now: told.append(now)))
        again = dict(workers.run(jobs(tmp_path / "more", rates[:1]), nobody))
        processes = [process.pid for process in workers._processes]
    assert len(processes) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    for number, job in enumerate(jobs(tmp_path / "one", rates)):
        bench = Bench(Together())
        (point,) = bench.points(job.method, [(job.values, job.experiment)])
        expected = without_time(bench.run_alone(point, job.partial, nobody))
        assert without_time(found[number]) == expected
        if number == 0:
            assert without_time(again[0]) == expected
    assert len(found[3]) < 4
    done = [now[0] for now in told]
    assert (done, done[0], done[-1]) == (sorted(set(done)), 0, 16)
    assert {now[1] for now in told} == {16}
    assert told[-1][2] == max(line["test_accuracy"] or 0.0 for of in found.values() for line in of)


def test_what_goes_wrong_is_told(tmp_path: Path) -> None:
    bad = jobs(tmp_path, [0.01])[0]._replace(values={"lr": -1.0})
    with Workers(2) as workers, pytest.raises(CrewError, match=r"'lr': -1.0}: .*lr"):
        list(workers.run([bad], nobody))
    with Workers(1) as workers, pytest.raises(CrewError, match="the same command goes on"):
        _ended(workers, jobs(tmp_path, [0.01]))
    workers = Workers(1)

    def kill(done: int, total: int, best: float | None) -> None:
        if done == 2:
            workers._processes[0].kill()

    with workers, pytest.raises(CrewError, match="the same command goes on"):
        list(workers.run(jobs(tmp_path, [0.01], rounds=100_000), kill))


def _ended(workers: Workers, given: list[Job]) -> None:
    """Asks a process that is there no more."""
    (process,) = workers._started()
    process.kill()
    process.wait()
    list(workers.run(given, nobody))


SCRIPT = """
import sys
from pathlib import Path
from fedlamb.reproduce.side_by_side import Workers
from test_side_by_side import jobs

def told(done, total, best):
    print(done, flush=True)

if __name__ == "__main__":
    with Workers(2) as workers:
        print(*(p.pid for p in workers._started()), flush=True)
        list(workers.run(jobs(Path(sys.argv[1]), [0.01, 0.03], 100_000, epochs=50), told))
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_they_end_with_the_one_that_asks_and_keep_their_rounds(
    number: signal.Signals, tmp_path: Path
) -> None:
    asking = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )
    assert asking.stdout is not None
    processes = [int(pid) for pid in asking.stdout.readline().split()]
    assert len(processes) == 2
    while int(asking.stdout.readline()) < 12:
        pass
    asking.send_signal(number)
    asking.stdout.close()
    asking.wait(timeout=60)
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/fd").exists() for pid in processes):  # not as a zombie
        assert time.monotonic() < end
        time.sleep(0.05)
    kept = [_rounds(tmp_path / str(i)) for i in range(2)]
    assert all(kept)
    if number == signal.SIGINT:  # a kill loses those since the last time that they were saved
        saved = [(tmp_path / str(i) / "checkpoint.safetensors").stat().st_mtime for i in range(2)]
        written = [(tmp_path / str(i) / "metrics.jsonl").stat().st_mtime for i in range(2)]
        assert all(s >= w for s, w in zip(saved, written, strict=True))


def _rounds(folder: Path) -> int:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    assert [line["round"] for line in whole] == list(range(1, len(whole) + 1))
    return len(whole)
