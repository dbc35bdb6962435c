"""Summaries, by hand-made lines; the default preset keeps what the README says of it."""

import json

import pytest

import fedlamb as fl
from fedlamb.experiment import build_run, load_experiment
from fedlamb.records import RunFolder, summary_of


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
