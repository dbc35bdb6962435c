"""Rounds planned by a process beside this one are the rounds that this one would plan."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlamb as fl
from fedlamb.files import exclusive
from fedlamb.plan import Plan
from fedlamb.simulate.planned import Ahead, Planned
from fedlamb.simulate.work import Assignment, assignments
from problems import Small
from test_executors import METHODS, close

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies processes")

LABELS = torch.arange(120) % 4
CLIENTS = {
    "equal": fl.iid(120, 8),
    "ragged": fl.dirichlet(LABELS, 8, 0.5, balanced=False),
    "dealt anew": fl.PerRound(lambda n, seed: fl.shards(LABELS, n, 2, seed), 8),
    "many": fl.iid(60_000, 50),  # more than a pipe holds
}


@pytest.fixture(autouse=True, params=[1, 3])
def no_child_is_left(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Whether one process plans or several in turn."""
    monkeypatch.setattr("fedlamb.simulate.planned._copies", lambda: request.param)
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def same(found: list[Assignment], expected: list[Assignment]) -> bool:
    def plain(each: Assignment) -> Any:
        draws = None if each.draws is None else each.draws.tolist()
        tensors = each.rows.tolist(), each.order.tolist(), each.keys.tolist(), draws
        return each.client, each.sizes, each.weight, tensors

    return [plain(each) for each in found] == [plain(each) for each in expected]


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("augments", [False, True])
@pytest.mark.parametrize("clients", CLIENTS.values(), ids=CLIENTS)
def test_the_work_is_the_same(clients: Any, augments: bool, weighting: str) -> None:
    plan = Plan(clients, fraction=0.5, batch_size=7, epochs=2, seed=3)
    planned = Planned(plan, augments, weighting)
    for round in range(1, 8):
        if round == 3:
            planned.plan_ahead()
        found = planned.work(round)
        assert same(found, assignments(plan, round, augments, weighting))
        assert planned.work(round) is found
    if isinstance(clients, fl.PerRound):  # a function that may need what a copy has not
        assert not planned._ahead
    else:
        assert planned._ahead
        # They have planned all of them since.
        assert all(ahead.close.alive for ahead in planned._ahead)


def beside(first: int = 1) -> tuple[Ahead, Any]:
    plan = Plan(CLIENTS["equal"], fraction=0.5, batch_size=7, epochs=1, seed=0)
    planned = partial(assignments, plan, augments=False, weighting="uniform")
    return Ahead(planned, first), planned


def test_another_round_than_the_next_is_not_planned_and_ends_the_process() -> None:
    ahead, planned = beside()
    assert same(ahead.work(1), planned(1))
    assert ahead.work(5) is None
    assert not ahead.close.alive
    assert ahead.work(2) is None


def test_a_process_that_is_killed_is_replaced_by_this_one() -> None:
    plan = Plan(CLIENTS["many"], fraction=0.5, batch_size=128, epochs=1, seed=0)
    planned = Planned(plan, False, "uniform")
    planned.plan_ahead()
    planned.work(1)
    assert planned._ahead
    os.kill(child(), signal.SIGKILL)
    for round in range(2, 20):
        assert same(planned.work(round), assignments(plan, round, False, "uniform"))
    assert not planned._ahead


def child() -> int:
    """The process beside this one, or the first of them."""
    with open("/proc/thread-self/children") as file:  # noqa: PTH123
        return min(map(int, file.read().split()))


def test_an_interrupt_while_reading_loses_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(CLIENTS["many"], fraction=0.5, batch_size=128, epochs=1, seed=0)
    planned = Planned(plan, False, "uniform")
    planned.plan_ahead()
    true, reads = os.readv, iter(range(100))

    def read(pipe: int, buffers: Any) -> int:
        if next(reads) == 1:  # in the middle of a round
            raise KeyboardInterrupt
        return true(pipe, buffers)

    monkeypatch.setattr(os, "readv", read)
    with pytest.raises(KeyboardInterrupt):
        planned.work(1)
    for round in range(1, 4):
        assert same(planned.work(round), assignments(plan, round, False, "uniform"))


def test_a_plan_that_fails_fails_here_and_is_not_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(CLIENTS["equal"], fraction=0.5, batch_size=7, epochs=1, seed=0)
    planned = Planned(plan, False, "uniform")
    true = planned._assignments

    def fails(round: int) -> Any:
        if round == 3:
            raise ValueError("no more")
        return true(round)

    planned._assignments = fails
    planned.plan_ahead()
    planned.work(1), planned.work(2)
    with pytest.raises(ValueError, match="no more"):
        planned.work(3)
    planned.plan_ahead()
    assert not planned._ahead
    assert same(planned.work(4), true(4))


def test_where_there_are_no_more_processes_this_one_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        forks.append(1)
        raise BlockingIOError(11, "no more")

    forks: list[int] = []
    monkeypatch.setattr(os, "fork", fork)
    small = Small(sizes=(6, 6, 6, 6), rounds=40)
    run, plain = (small.fit(METHODS["fed-lamb"], executor="vectorised") for _ in range(2))
    run._looks_ahead = True
    before = len([*Path("/proc/self/fd").iterdir()])
    close(run, plain)
    assert len(forks) == 1
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_lock_is_let_go_of_while_the_process_is_there(tmp_path: Any) -> None:
    with exclusive(tmp_path / "lock", wait=False):
        ahead, planned = beside()
        assert same(ahead.work(1), planned(1))  # it is at work, and holds nothing else by now
    with exclusive(tmp_path / "lock", wait=False):
        assert ahead.close.alive


def test_signals_while_it_is_made_reach_this_process_alone() -> None:
    true = os.fork

    def fork() -> int:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # pending until it is made
        return true()

    # A process that was started in the background may ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fork = fork
    try:
        with pytest.raises(KeyboardInterrupt):
            beside()
    finally:
        os.fork = true
        signal.signal(signal.SIGINT, handler)


def test_another_copy_of_this_process_ends_nothing() -> None:
    ahead, planned = beside()
    pid = os.fork()
    if pid == 0:
        try:
            ahead.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert [same(ahead.work(round), planned(round)) for round in (1, 2, 3)] == [True] * 3


def test_of_two_each_ends_by_itself() -> None:
    one, planned = beside()
    two, _ = beside()  # a copy that holds the other's pipe open as well
    one.close()
    assert same(two.work(1), planned(1))


def test_it_ends_with_what_it_works_for() -> None:
    ahead, _ = beside()
    pid = child()
    del ahead
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_ends_when_the_process_that_reads_is_killed() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ahead, _ = beside()
            os.write(writer, str(child()).encode())
            time.sleep(60)
            ahead.close()
        finally:
            os._exit(1)
    beside_it = int(os.read(reader, 20))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    end = time.monotonic() + 10
    while alive(beside_it):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.close(reader), os.close(writer)


def alive(pid: int) -> bool:
    """Whether it is there and no zombie that waits for its new parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", ["fed-lamb", "mime"])
def test_a_run_whose_device_waits_has_its_rounds_planned_beside_it(name: str) -> None:
    small = Small(sizes=(6, 6, 6, 6), rounds=40)
    run, plain = (small.fit(METHODS[name], executor="vectorised", fraction=0.5) for _ in range(2))
    run._looks_ahead = True  # as on a GPU
    used = []
    for done in run:
        ahead = run._executor._planned._ahead
        used.append(bool(ahead) and all(each.close.alive for each in ahead))
        assert done.metrics == next(plain).metrics
    assert not any(used[:2])
    assert any(used[3:-1])
    assert not used[-1]  # the last round is planned
    assert not run._executor._planned._ahead  # the run has ended
    close(run, plain)


def test_a_run_that_goes_back_plans_by_itself(tmp_path: Any) -> None:
    small = Small(sizes=(6, 6, 6, 6), rounds=40)
    run = small.fit(METHODS["fed-lamb"], executor="vectorised")
    run._looks_ahead = True
    next(run)
    run.save(tmp_path / "c")
    first = [r.metrics for r in run]
    run.restore(tmp_path / "c")
    assert [r.metrics for r in run] == first
