"""Summaries, by hand-made lines; the default preset keeps what the README says of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlamb as fl
from fedlamb.experiment import build_run
from fedlamb.records import RunFolder, conduct, summary_of
from fedlamb.settings import load_experiment
from fedlamb.simulate.saved import Journal
from problems import Small


def line(number, accuracy):
    return {
        "round": number,
        "test_accuracy": accuracy,
        "uplink_bytes": 10,
        "downlink_bytes": 7,
        "seconds": 0.5,
    }


def test_summary_of_hand_made_lines():
    lines = [line(1, 0.5), line(2, 0.9), line(3, 0.95), line(4, 0.95), line(5, 0.7)]
    s = summary_of("mime", "finished", 0.9, lines)
    assert (s.best_accuracy, s.best_round, s.final_accuracy) == (0.95, 3, 0.7)
    assert s.rounds_to_target == 2
    assert (s.uplink_bytes, s.downlink_bytes, s.seconds, s.rounds) == (50, 35, 2.5, 5)
    assert summary_of("mime", "finished", 0.96, lines).rounds_to_target is None
    assert summary_of("mime", "interrupted", 0.9, []).best_accuracy is None


def test_a_damaged_line_in_the_middle_is_told(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create({})
    lines = [json.dumps(line(n, 0.5)) for n in (1, 2, 3)]
    lines[1] = lines[1][:10]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(fl.SettingError, match="has 1 readable lines in metrics.jsonl for 3"):
        folder.keep_rounds(3)


@pytest.mark.parametrize("method", fl.ALGORITHMS)
def test_every_method_passes_90_percent_on_the_digits(method):
    run = build_run(load_experiment("digits"), method)
    assert max(r.metrics["test_accuracy"] for r in run) > 0.9


@pytest.mark.parametrize(
    ("death", "saved"),
    [(RuntimeError("as good as killed"), 1), (KeyboardInterrupt(), 5)],
    ids=["killed", "Ctrl-C"],
)
def test_rounds_that_were_not_saved_are_run_again_to_the_same_bits(
    death: BaseException, saved: int, tmp_path: Path
) -> None:
    small = Small()

    def run() -> fl.Run:
        options = {"clients": small.clients(), "rounds": 8, "batch_size": 3, "fraction": 0.5}
        return fl.fit(fl.FedLAMB(lr=0.05), small.task(), **options)

    def conducted(folder: RunFolder, dies_after: int | None = None) -> fl.Run:
        def on_round(done: Any) -> None:
            if done.number == dies_after:
                raise death

        one = run()
        if not folder.journal.exists():
            folder.create({})
        conduct(one, folder, on_round, stop=lambda: False, saving=0.0)  # only the first round
        return one

    whole = conducted(RunFolder(tmp_path / "whole"))
    broken = RunFolder(tmp_path / "broken")
    with pytest.raises(type(death)):
        conducted(broken, dies_after=5)
    assert len(broken.metrics()) == 5
    resumed = run()
    broken.journal.read(resumed)
    assert resumed.number == saved
    again = conducted(RunFolder(tmp_path / "broken"))
    for name, value in whole.params.items():
        assert torch.equal(again.params[name], value)
    rounds = [{**line, "seconds": 0} for line in RunFolder(tmp_path / "whole").metrics()]
    assert [{**line, "seconds": 0} for line in broken.metrics()] == rounds
    assert len(rounds) == 8


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_states_of_rounds_that_were_not_saved_are_saved_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_is_full: bool
) -> None:
    small = Small()
    options = {"clients": small.clients(), "rounds": 9, "batch_size": 3, "fraction": 0.5}
    run = fl.fit(fl.FedLAMB(lr=0.05), small.task(), **options)
    journal = Journal(tmp_path)
    for done in run:
        journal.note(run)
        if disk_is_full and done.number == 5:
            with monkeypatch.context() as patched:
                patched.setattr("fedlamb.simulate.saved.save_checkpoint", no_space)
                with pytest.raises(OSError, match="No space"):
                    journal.write(run)
        if done.number in (1, 6):
            journal.write(run)
        if done.number == 6:
            break
    again = fl.fit(fl.FedLAMB(lr=0.05), small.task(), **options)
    Journal(tmp_path).read(again)
    assert again.number == 6
    for _ in range(3):
        assert next(run).metrics == next(again).metrics


def no_space(*given: Any) -> None:
    raise OSError("No space left on device")
