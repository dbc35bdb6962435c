"""Runs spread over processes: the same trajectory, and a clean end where one of them dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedlamb as fl
from fedlamb.cli import workers
from fedlamb.plan import Plan
from fedlamb.simulate.crew import Crew
from fedlamb.simulate.distributed import Share, balanced
from problems import Small
from test_cli import SMALL, command, results

HERE = Path(__file__).parent


def crew(size: int, script: str = "ranks.py", *options: str) -> str:
    """What rank 0 of the script prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *options],
            env={**os.environ, **(group if size > 1 else {}), "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * size
    return outputs[0]


@pytest.fixture(scope="module")
def alone() -> Any:
    return json.loads(crew(1))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_the_same_trajectory_over_ten_rounds(alone: Any, size: int) -> None:
    together = json.loads(crew(size))
    assert together.keys() == alone.keys()
    for key, expected in alone.items():
        found = together[key]
        for (clients, metrics, up, down), wanted in zip(found[:-1], expected[:-1], strict=True):
            assert [clients, up, down] == [wanted[0], *wanted[2:]], key
            assert metrics == pytest.approx(wanted[1], rel=1e-9, abs=1e-9), key
        for name, values in expected[-1].items():
            assert found[-1][name] == pytest.approx(values, rel=1e-9, abs=1e-9), (key, name)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for threads by /proc")
@pytest.mark.parametrize("options", [[], ["--own-group"]])
def test_threads_that_carry_messages_end_before_python_does(options: list[str]) -> None:
    crew(2, "ranks_end.py", *options)


@pytest.mark.parametrize(("size", "shares"), [(2, [2, 3]), (3, [1, 2, 2])])
def test_the_leader_has_the_smallest_share_of_clients_without_state(
    size: int, shares: list[int]
) -> None:
    plan = Plan([torch.arange(3)] * 5, fraction=1.0, batch_size=3, epochs=1, seed=0)
    own = [Share(plan, Crew(rank, size), stateless=True).own(1) for rank in range(size)]
    assert [len(clients) for clients in own] == shares
    assert sorted(client for clients in own for client in clients) == [0, 1, 2, 3, 4]


@given(
    cohort=st.sets(st.integers(0, 60), min_size=1, max_size=30).map(sorted),
    size=st.integers(1, 7),
)
def test_clients_with_state_are_shared_evenly_and_few_of_them_travel(
    cohort: list[int], size: int
) -> None:
    hosts = balanced(cohort, Crew(0, size))
    assert sorted(hosts) == cohort
    shares = [list(hosts.values()).count(rank) for rank in range(size)]
    assert max(shares) - min(shares) <= 1
    owned = [sum(client % size == rank for client in cohort) for rank in range(size)]
    least, more = divmod(len(cohort), size)
    # Each keeps what it owns up to its share; as many as can be have the larger share for it.
    above = sum(number > least for number in owned)
    fewest = sum(max(0, number - least) for number in owned) - min(above, more)
    assert sum(host != client % size for client, host in hosts.items()) == fewest


def test_a_mean_has_the_types_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crew, "_reduce", lambda *given: None)
    kinds = (torch.float32, torch.float64, torch.float16)
    part = {str(kind): torch.full((2, 3), 0.5, dtype=kind) for kind in kinds}
    mean = Crew(0, 2).mean(part, 3.0)
    assert {name: (t.dtype, t.tolist()) for name, t in mean.items()} == {
        name: (t.dtype, t.tolist()) for name, t in part.items()
    }


def test_states_travel_in_the_runs_that_are_compared() -> None:
    for size in (2, 3):
        run = Small(sizes=(6, 6, 6, 6, 6), rounds=10).fit(fl.FedAMS(lr=0.1), fraction=0.4)
        share = Share(run.plan, Crew(0, size), stateless=False)
        assert sum(bool(share.visits(number)) for number in range(1, 11)) >= 2


def test_workers_are_stopped_resumed_and_give_the_same_bits(tmp_path: Path) -> None:
    options = (*SMALL, "-s", "federation.rounds=30", "-m", "fed-lamb", "--workers", "2")
    whole = command("run", *options, "-o", f"{tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    assert "Traceback" not in whole.stderr
    assert "2 workers" in whole.stdout
    process = start(options, tmp_path / "r")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    done = len(results(tmp_path / "r"))
    assert 5 <= done < 30
    resumed = command("resume", f"{tmp_path}/r")
    assert resumed.returncode == 0, resumed.stderr
    assert results(tmp_path / "r") == results(tmp_path / "whole")


ANEW = "import os; os.cpu_count = lambda: 4; from fedlamb.cli import main; main()"


def test_workers_that_start_anew_give_what_copies_give(tmp_path: Path) -> None:
    options = ("run", *SMALL, "-m", "fed-ams", "--workers", "2")
    copies = command(*options, "-o", f"{tmp_path}/copies")
    # Where each has more threads than one, they cannot be copies.
    given = [sys.executable, "-c", ANEW, *options, "-o", f"{tmp_path}/anew"]
    anew = subprocess.run(given, capture_output=True, text=True)
    for done in (copies, anew):
        assert (done.returncode, done.stderr) == (0, "")
        assert "2 workers" in done.stdout
    assert results(tmp_path / "anew") == results(tmp_path / "copies")


def test_processes_are_copied_only_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(workers.threading, "active_count", lambda: 1)
    monkeypatch.setattr(workers.sys, "platform", "linux")
    cpu = torch.device("cpu")
    assert workers.can_be_copied(4, cpu)
    assert not workers.can_be_copied(2, cpu)  # two threads each
    assert not workers.can_be_copied(4, torch.device("cuda", 0))
    monkeypatch.setattr(workers.threading, "active_count", lambda: 2)
    assert not workers.can_be_copied(4, cpu)
    monkeypatch.setattr(workers.threading, "active_count", lambda: 1)
    monkeypatch.setattr(workers.sys, "platform", "darwin")
    assert not workers.can_be_copied(4, cpu)


def test_an_error_of_a_copy_is_told(tmp_path: Path) -> None:
    """What is no fault of the settings, with where it came from; the run ends."""
    (tmp_path / "odd.py").write_text(ODD)
    options = (*SMALL, "-m", "fed-sgd", "-s", "model.name=odd:build", "--workers", "2")
    given = [sys.executable, "-m", "fedlamb", "run", *options, "-o", "r"]
    done = subprocess.run(given, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: no good here" in done.stderr
    assert "another worker of this run has ended" in done.stderr


ODD = """
import os
from torch import nn

class Odd(nn.Linear):
    def forward(self, x):
        if os.environ.get("RANK") == "1" and self.training:
            raise RuntimeError("no good here")
        return super().forward(x.flatten(1))

def build(shape, classes):
    return Odd(64, classes)
"""


def test_a_worker_that_dies_ends_the_run_cleanly(tmp_path: Path) -> None:
    options = (*SMALL, "-s", "federation.rounds=100000", "-m", "fed-lamb", "--workers", "2")
    process = start(options, tmp_path / "r")
    (other,) = children(process.pid)
    os.kill(other, signal.SIGKILL)
    begun = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert process.returncode == 1
    assert "another worker of this run has ended" in said
    assert f"fedlamb resume {tmp_path / 'r'} goes on from there" in said.replace("\n", " ")
    goes_on(tmp_path / "r")


def goes_on(folder: Path) -> None:
    """Whether three more rounds can be run."""
    done = len(results(folder))
    settings = json.loads((folder / "settings.json").read_text())
    settings["federation"]["rounds"] = done + 3
    (folder / "settings.json").write_text(json.dumps(settings))
    resumed = command("resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert len(results(folder)) == done + 3


def test_a_worker_that_hangs_keeps_nobody_from_going_on(tmp_path: Path) -> None:
    options = (*SMALL, "-s", "federation.rounds=100000", "-m", "fed-lamb", "--workers", "2")
    process = start(options, tmp_path / "r")
    (other,) = children(process.pid)
    os.kill(other, signal.SIGSTOP)
    try:
        process.kill()
        process.wait()
        goes_on(tmp_path / "r")
    finally:
        os.kill(other, signal.SIGKILL)
        process.communicate()


def test_no_worker_outlives_a_killed_leader(tmp_path: Path) -> None:
    options = (*SMALL, "-s", "federation.rounds=100000", "-m", "fed-lamb", "--workers", "2")
    process = start(options, tmp_path / "r")
    (other,) = children(process.pid)
    process.kill()
    process.communicate()
    for _ in range(300):
        if not Path(f"/proc/{other}").exists() or "Z" in state(other):
            return
        time.sleep(0.1)
    pytest.fail("the worker is still there")


def start(options: tuple[str, ...], folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlamb", "run", *options, "-o", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
