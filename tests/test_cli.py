"""The command, as a user calls it: in processes of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedlamb as fl
from fedlamb.cli import app
from fedlamb.errors import SettingError
from fedlamb.experiment import build_run, device_of
from fedlamb.records import RunFolder
from fedlamb.settings import Engine, load_experiment
from formats import pictures, write_idx

ENDLESS = ("-s", "federation.rounds=100000")
SMALL = ("-s", "split.clients=8", "-s", "model.hidden=[8]", "-s", "federation.rounds=6")


def command(
    *arguments: str, cache: Path = Path("no cache"), **options: Any
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(cache),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "fedlamb", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
        **options,
    )


def results(folder: Path) -> list[dict[str, Any]]:
    """All that a run measured, except its times."""
    lines = RunFolder(folder).metrics()
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def clients(folder: Path) -> set[str]:
    return {f"clients/{path.name}" for path in (folder / "clients").iterdir()}


def test_compare_runs_all_six_and_draws_the_report(tmp_path):
    done = command("compare", *SMALL, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    for method in fl.ALGORITHMS:
        assert re.search(rf"│ {method} +│ +[0-9.]+ %", done.stdout), method
        folder = tmp_path / "run" / method
        assert {p.name for p in folder.iterdir()} >= {
            "settings.json",
            "environment.json",
            "metrics.jsonl",
            "checkpoint.safetensors",
            "summary.json",
        }
        assert len(results(folder)) == 6
        assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert (tmp_path / "run" / "report.html").stat().st_size > 10**6
    assert "report.html" in done.stdout


def test_methods_share_cohorts_and_start(tmp_path):
    command("compare", *SMALL, "-m", "fed-sgd", "-m", "fed-lamb", "--out", str(tmp_path / "run"))
    one, two = (results(tmp_path / "run" / m) for m in ("fed-sgd", "fed-lamb"))
    assert [line["clients"] for line in one] == [line["clients"] for line in two]


def test_run_takes_the_method_s_own_settings(tmp_path):
    done = command(
        "run", "-m", "mime", *SMALL, "-s", "algorithm.sync_every=2", "-o", f"{tmp_path}/r"
    )
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "r" / "settings.json").read_text())
    assert settings["algorithms"]["mime"]["sync_every"] == 2
    assert list(settings["algorithms"]) == ["mime"]
    up = [line["uplink_bytes"] for line in results(tmp_path / "r")]
    assert up[0] == 2 * up[1]


def test_a_run_folder_is_a_preset(tmp_path):
    command("run", "-m", "mime", *SMALL, "-o", f"{tmp_path}/one")
    command("run", "-p", f"{tmp_path}/one/settings.json", "-o", f"{tmp_path}/two")
    assert results(tmp_path / "one") == results(tmp_path / "two")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_and_resumed_gives_the_same_bits(tmp_path, stop):
    long = ("-s", "federation.rounds=40", "-s", "model.hidden=[32]", "-m", "fed-lamb,mime")
    whole = command("compare", *long, "-o", f"{tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    broken = tmp_path / "broken"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlamb", "compare", *long, "-o", str(broken)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = broken / "fed-lamb" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(stop)
    output, _ = process.communicate(timeout=60)
    if stop == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert f"Go on with: fedlamb resume {broken}" in output.replace("\n", "")
        assert "Not begun: mime" in output
        said = "after the round" if stop == signal.SIGINT else "at once; the round under way"
        assert f"Stopped {said}" in output
        assert json.loads((broken / "fed-lamb/summary.json").read_text())["status"] == "interrupted"
    assert 5 <= len(results(broken / "fed-lamb")) < 40

    resumed = command("resume", str(broken))
    assert resumed.returncode == 0, resumed.stderr
    for method in ("fed-lamb", "mime"):
        assert results(broken / method) == results(tmp_path / "whole" / method)
        for place in ("checkpoint.safetensors", *sorted(clients(tmp_path / "whole" / method))):
            ours, theirs = (
                load_file(tmp_path / name / method / place) for name in ("broken", "whole")
            )
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert clients(broken / method) == clients(tmp_path / "whole" / method)


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    command("run", *SMALL, "-o", f"{tmp_path}/r")
    before = results(tmp_path / "r")
    assert command("resume", f"{tmp_path}/r").returncode == 0
    assert results(tmp_path / "r") == before


def test_a_crash_between_a_line_and_its_checkpoint_loses_nothing(tmp_path):
    command("run", *SMALL, "-o", f"{tmp_path}/whole")
    command("run", *SMALL, "-o", f"{tmp_path}/r", "-s", "federation.rounds=3")
    settings = json.loads((tmp_path / "r/settings.json").read_text())
    settings["federation"]["rounds"] = 6
    (tmp_path / "r/settings.json").write_text(json.dumps(settings))
    with (tmp_path / "r/metrics.jsonl").open("a") as file:
        file.write(json.dumps({**results(tmp_path / "r")[-1], "round": 4}) + '\n{"round": 5, "te')
    assert command("resume", f"{tmp_path}/r").returncode == 0
    assert results(tmp_path / "r") == results(tmp_path / "whole")


def test_report_is_redrawn_from_the_folder_alone(tmp_path):
    command("compare", *SMALL, "-m", "fed-sgd,mime", "-o", f"{tmp_path}/r")
    (tmp_path / "r/report.html").unlink()
    done = command("report", f"{tmp_path}/r")
    assert done.returncode == 0
    assert (tmp_path / "r/report.html").exists()
    assert "mime" in done.stdout


def test_a_sweep_gives_what_separate_runs_give_and_goes_on_where_it_was(tmp_path):
    options = ("-m", "fed-lamb", *SMALL, "-g", "lr=0.03,0.1", "--seeds", "2")
    done = command("sweep", *options, "-o", f"{tmp_path}/s")
    assert done.returncode == 0, done.stderr
    assert "4 trials of fed-lamb" in done.stdout
    lines = [json.loads(t) for t in (tmp_path / "s/trials.jsonl").read_text().splitlines()]
    assert [(line["values"]["lr"], line["seed"]) for line in lines] == [
        (0.03, 0),
        (0.03, 1),
        (0.1, 0),
        (0.1, 1),
    ]
    command("run", *SMALL, "-s", "algorithm.lr=0.1", "-s", "seed=1", "-o", f"{tmp_path}/r")
    alone = [line["test_accuracy"] for line in results(tmp_path / "r")]
    assert lines[3]["test_accuracy"] == pytest.approx(alone, abs=0.006)  # of 360 examples, two
    log = tmp_path / "s/trials.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]) + '{"values": {"lr"')
    again = command("sweep", *options, "-o", f"{tmp_path}/s")
    assert "1 trials of fed-lamb" in again.stdout
    other = command("sweep", *options, "--seeds", "3", "-o", f"{tmp_path}/s")
    assert other.returncode == 2
    assert "holds a sweep with other settings" in other.stderr
    (tmp_path / "s/report.html").unlink()
    drawn = command("report", f"{tmp_path}/s")
    assert drawn.stdout.splitlines()[:7] == again.stdout.splitlines()[-9:-2]
    assert drawn.stdout.count("    2 │") == 2  # seeds of each point
    assert "lr = 0.03" in (tmp_path / "s/report.html").read_text()
    assert "below its best" not in drawn.stdout
    resumed = command("resume", f"{tmp_path}/s")  # nothing is left of it
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == drawn.stdout + f"Sweep folder: {tmp_path}/s\n"
    assert command("resume", f"{tmp_path}/s", "--workers", "2").returncode == 2
    lower = [{**x, "final_accuracy": x["best_accuracy"] - 0.3} for x in lines]
    log.write_text("".join(json.dumps(x) + "\n" for x in lower))
    told = command("report", f"{tmp_path}/s").stdout
    assert "The first of them ends 30 points below its best; a lower rate" in told


def test_a_run_that_ends_far_below_its_best_says_what_may_keep_it(tmp_path):
    done = command(
        "run", "-m", "fed-lamb", *SMALL, "-s", "federation.rounds=6", "-o", f"{tmp_path}/r"
    )
    assert "below its best" not in done.stdout
    metrics = tmp_path / "r/metrics.jsonl"
    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    for line, accuracy in zip(lines, (0.5, 0.7, 0.9, 0.8, 0.7, 0.6), strict=True):
        line["test_accuracy"] = accuracy
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = command("report", f"{tmp_path}/r").stdout
    assert "fed-lamb: ends 30 points below its best" in told
    schedule = re.search(r"-s (algorithms.fed-lamb.schedule=)'([^']+)'", told)
    again = command("run", *SMALL, "-s", schedule[1] + schedule[2], "-o", f"{tmp_path}/s")
    assert again.returncode == 0, again.stderr  # what it names can be given


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_is_stopped_goes_on_to_the_same_trials(tmp_path, stop):
    options = ("sweep", "-m", "mime", *SMALL, "-s", "federation.rounds=80", "-g", "lr=0.001,0.01")
    assert command(*options, "-o", f"{tmp_path}/whole").returncode == 0
    begun = subprocess.Popen(
        [sys.executable, "-m", "fedlamb", *options, "-o", f"{tmp_path}/killed"],
        stdout=subprocess.DEVNULL,
    )
    saved = tmp_path / "killed/partial"
    while len(list(saved.glob("*/checkpoint.safetensors"))) < 2 and begun.poll() is None:
        time.sleep(0.01)
    begun.send_signal(stop)
    code = begun.wait()
    assert code == (-stop if stop == signal.SIGKILL else 130)  # it was not done yet
    told = command("report", f"{tmp_path}/killed")
    assert told.returncode == 2
    assert "holds no finished trial yet" in told.stderr
    again = ("resume",) if stop == signal.SIGKILL else (*options, "-o")
    done = command(*again, f"{tmp_path}/killed")
    assert done.returncode == 0, done.stderr
    assert "going on after round" in done.stdout
    assert not saved.exists()
    one, two = (
        [json.loads(text) for text in (tmp_path / name / "trials.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    )
    for whole, killed in zip(one, two, strict=True):
        for key in ("values", "seed", "status", "rounds", "test_accuracy", "uplink_bytes"):
            assert whole[key] == killed[key]


def test_two_processes_do_not_share_a_folder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlamb", "run", *ENDLESS, "-o", f"{tmp_path}/r"],
        stdout=subprocess.DEVNULL,
    )
    try:
        while not (tmp_path / "r/metrics.jsonl").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        second = command("resume", f"{tmp_path}/r")
        assert second.returncode == 2
        assert "is in use by another process" in second.stderr
    finally:
        process.kill()
        process.wait()


def test_divergence_is_shown_not_hidden(tmp_path):
    done = command("run", "-m", "adp-fed", *SMALL, "-s", "algorithm.lr=1e38", "-o", f"{tmp_path}/r")
    assert done.returncode == 0, done.stderr
    assert "diverged" in done.stdout
    assert "NaN" not in (tmp_path / "r/metrics.jsonl").read_text()


def test_a_preset_on_image_files_end_to_end(tmp_path):
    """The paper's MNIST preset on a small set of its form: decoded, dealt anew, resumed."""
    write_idx(tmp_path / "data/mnist", pictures(600, size=28), pictures(60, size=28), zipped=True)
    options = ("-p", "mnist-mlp-iid", "--data-root", "data", "-m", "fed-lamb,mime")
    home = {"cwd": tmp_path, "cache": tmp_path / "cache"}
    done = command("compare", *options, "-s", "federation.rounds=2", "-o", "short", **home)
    assert done.returncode == 0, done.stderr
    assert "Decoding mnist" in done.stdout
    settings = json.loads((tmp_path / "short/settings.json").read_text())
    assert settings["data"]["root"] == str(tmp_path / "data")
    whole = command(
        "compare",
        *options,
        "-s",
        "federation.rounds=4",
        "-s",
        "data.validation=0.1",
        "-o",
        "whole",
        **home,
    )
    assert whole.returncode == 0, whole.stderr
    assert "Decoding" not in whole.stdout
    assert "validation_accuracy" in results(tmp_path / "whole/mime")[-1]
    settings["federation"]["rounds"] = 4
    settings["data"]["validation"] = 0.1
    (tmp_path / "short/settings.json").write_text(json.dumps(settings))
    other = command("resume", "short", **home)
    assert other.returncode == 2  # it was another run: the data are not the same
    assert "was made with" in other.stderr


def test_one_s_own_model_in_this_folder(tmp_path):
    (tmp_path / "mine.py").write_text((Path(__file__).parent / "my_models.py").read_text())
    done = command("run", "-s", "model.name=mine:build", *SMALL, "-o", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_splits_by_file(tmp_path):
    lists = [list(range(700)), list(range(700, 1437))]
    (tmp_path / "split.json").write_text(json.dumps(lists))
    changes = ("-s", "split={kind='file', file='split.json'}", "-s", "federation.rounds=2")
    done = command("run", *changes, "-s", "federation.fraction=1", "-o", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "r")[-1]["clients"] == [0, 1]
    done = command(
        "run",
        *changes,
        "-s",
        "federation.fraction=1",
        "-s",
        "data.validation=0.2",
        "-o",
        "v",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_data_list_prepare_and_split(tmp_path):
    write_idx(tmp_path / "mnist", pictures(60, size=28), pictures(6, size=28))
    home = {"cwd": tmp_path, "cache": tmp_path / "cache"}
    before = command("data", "list", "--data-root", ".", **home)
    assert re.search(r"│ mnist +│ [^│]+│ no", before.stdout), before.stdout
    assert re.search(r"^mnist: +mnist$", before.stdout, re.M)
    assert "the hub, as" in before.stdout
    done = command("data", "prepare", "mnist", "--data-root", ".", **home)
    assert "60 training and 6 test examples of shape (1, 28, 28), 3 classes" in done.stdout
    assert re.search(r"decoded in .*mnist-[0-9a-f]{24}\.safetensors \(0\.1 MB\)", done.stdout)
    after = command("data", "list", "--data-root", ".", **home)
    assert re.search(r"│ mnist +│ [^│]+│ yes", after.stdout), after.stdout

    dealt = command("data", "split", "mnist", "-n", "6", "--data-root", ".", "-o", "s.html", **home)
    assert dealt.returncode == 0, dealt.stderr
    assert "6 clients, 60 rows; rows per client: 10 to 10, median 10" in dealt.stdout
    assert re.search(r"classes per client: 1: \d clients?, 2: \d clients?", dealt.stdout)
    assert len(re.findall(r"^ +[0-5] +10 [012]+ ", dealt.stdout, re.M)) == 6
    assert "plotly" in (tmp_path / "s.html").read_text().lower()
    few = command("data", "split", "digits", "-n", "30", "--kind", "iid", "--show", "2", **home)
    assert "… and 28 more clients" in few.stdout


BAD_CALLS = {
    "axis twice": (("sweep", "-g", "lr=0.1", "-g", "lr=0.2"), "--grid = 'lr': must be given once"),
    "axis of another part": (("sweep", "-g", "rounds=1,2"), "--grid = 'rounds': is unknown; known"),
    "sweep without its data": (
        ("sweep", "-p", "mnist-mlp-iid", "--data-root", "nowhere", "-o", "x"),
        "nowhere",
    ),
    "value twice": (("sweep", "-g", "lr=0.1,1e-1"), "must name each value once, and has 0.1 twice"),
    "bad grid": (("sweep", "-g", "lr"), "--grid = 'lr': must be KEY=A,B,C"),
    "bad value in a grid": (("sweep", "-g", "lr=0.1,-1"), "algorithms.fed-lamb.lr = -1: must be"),
    "no GPU": (("run", "--device", "cuda:9"), "engine.device = 'cuda:9': "),
    "no root": (
        ("data", "list", "--data-root", "nowhere"),
        "--data-root = 'nowhere': must be a folder that exists",
    ),
    "no method": (("compare", "-m", ""), "methods = '': names no method"),
    "no device": (("run", "--device", "tpu"), "engine.device = 'tpu': must be cpu, cuda or cuda:N"),
    "unknown data": (("data", "prepare", "mnits"), "data.name = 'mnits': is unknown; did you mean"),
    "unknown split": (("data", "split", "digits", "--kind", "x"), "split.kind = 'x': must be"),
    "split too fine": (("data", "split", "digits", "-n", "999"), "split.clients = 999: needs 1998"),
    "page of a split": (("data", "split", "digits", "-o", "x.png"), "'x.png': must end with .html"),
    "unknown method": (("run", "-m", "fed-lamp"), "method = 'fed-lamp': is unknown; did you mean"),
    "a class": (("run", "-m", "FedLAMB"), "'FedLAMB': is unknown; did you mean 'fed-lamb'?"),
    "two methods": (("run", "-m", "mime,fed-sgd"), "fedlamb compare -m mime,fed-sgd runs several"),
    "unknown methods": (("compare", "-m", "fed-avg"), "methods = 'fed-avg': is unknown"),
    "unknown preset": (("run", "-p", "mnist9"), "preset = 'mnist9': is unknown"),
    "unknown key": (("run", "-s", "federation.clients=3"), "federation.clients = 3: is no setting"),
    "wrong type": (("run", "-s", "federation.rounds=ten"), "federation.rounds = 'ten': must be"),
    "negative rate": (("run", "-s", "algorithm.lr=-0.1"), "algorithms.fed-lamb.lr = -0.1: must be"),
    "fraction 0": (("run", "-s", "federation.fraction=0"), "federation.fraction = 0: must be"),
    "fraction 2": (("run", "-s", "federation.fraction=2"), "federation.fraction = 2: must be"),
    "too many clients": (("run", "-s", "split.clients=9999"), "split.clients = 9999: needs 19998"),
    "no run folder": (("resume", "nowhere"), "FOLDER = 'nowhere': must be a folder made by"),
    "rate for all in compare": (
        ("compare", "-s", "algorithm.lr=0.1"),
        "algorithm = {'lr': 0.1}: is for `run`, with its one method; here give "
        "algorithms.METHOD.lr",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_input_exits_with_2_and_one_sentence(tmp_path, arguments, message):
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # nothing half-made is left behind


def test_an_existing_folder_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    done = command("run", *SMALL, "-o", str(tmp_path))
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_help_is_worth_reading():
    assert "fed-lamb" in command("--help").stdout
    for name in ("compare", "run", "resume", "report"):
        text = command(name, "--help").stdout
        assert len(text) > 300, name
    assert command("--version").stdout.strip() == fl.__version__


def test_the_number_of_workers_is_measured_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlamb.cli import workers

    monkeypatch.setattr(workers.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(workers, "can_be_copied", lambda *given: False)
    experiment = load_experiment("digits", ["federation.rounds=1"])
    federation = build_run(experiment, "fed-sgd")
    before = torch.get_num_threads()
    monkeypatch.setattr(workers, "_START", 1e6)
    number, why = workers.best_number(federation, 1)
    assert number == 1  # long to start for little to do
    assert re.fullmatch(r"estimated for the whole: 1: \d+ s, 2: \d+ s", why)
    assert torch.get_num_threads() == before
    assert federation.number == 0
    monkeypatch.setattr(workers, "_START", -1e6)
    assert workers.best_number(federation, 1)[0] == 2
    out = tmp_path / "run"
    done = command("run", "-w", "auto", *SMALL, "-o", str(out))
    said = re.search(r"Workers: (\d+) \(estimated", done.stdout)
    assert said is not None
    kept = json.loads((out / "settings.json").read_text())["engine"]["workers"]
    assert kept == int(said[1])  # 1, except where other programs slow down several threads
    wrong = command("run", "-w", "none", "-o", str(tmp_path / "other"))
    assert "must be a whole number from 1 on, or 'auto'" in wrong.stderr


def test_workers_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of(Engine(device="cuda", workers=2)) == torch.device("cuda", 1)
    with pytest.raises(SettingError, match=r"engine\.workers = 3: must be at most 2, the GPUs"):
        device_of(Engine(device="cuda", workers=3))
    with pytest.raises(SettingError, match=r"'cuda:0': is one GPU for 2 workers"):
        device_of(Engine(device="cuda:0", workers=2))
    with pytest.raises(SettingError, match=r"'cuda:2': is GPU number 3, and torch sees 2"):
        device_of(Engine(device="cuda:2"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingError, match=r"'cuda': needs a GPU, and torch sees none"):
        device_of(Engine(device="cuda"))


def test_more_workers_than_clients_and_files_for_folders_are_told(tmp_path: Path) -> None:
    many = command("run", "-w", "11", "-o", str(tmp_path / "run"))
    assert many.returncode == 2
    assert "engine.workers = 11: must be at most 10, the clients of a round" in many.stderr
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    for results in (tmp_path / "file", tmp_path / "file" / "below"):
        wrong = command("reproduce", "fig2", "--results", str(results))
        assert wrong.returncode == 2
        assert f"must be a folder; {tmp_path / 'file'} is a file" in wrong.stderr


def test_a_long_round_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedlamb.cli import display

    with display.progress() as shown:
        shown.begin("fed-lamb", 100, 3)
        shown.client(1, 25)
        monkeypatch.setattr(display, "_SILENCE", -1.0)
        shown.client(2, 25)
        shown.rounds(4, 0.5)
        shown.client(1, 25)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "fed-lamb round 4/100 client 2/25",
        "fed-lamb round 4/100 best 50.0 %",
        "fed-lamb round 5/100 client 1/25",
    ]


def test_rounds_without_a_checkpoint_are_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command("run", *SMALL, "-o", str(out))
    (out / "checkpoint.safetensors").unlink()
    before = (out / "metrics.jsonl").read_bytes()
    again = command("resume", str(out))
    assert again.returncode == 2
    assert "has rounds in metrics.jsonl and no checkpoint.safetensors" in again.stderr
    assert (out / "metrics.jsonl").read_bytes() == before


def test_settings_of_methods_that_do_not_run_are_refused(tmp_path: Path) -> None:
    for name in ("run", "sweep"):
        wrong = command(name, "-m", "fed-sgd", "-s", "algorithms.fed-ams.lr=1", "-o", str(tmp_path))
        assert wrong.returncode == 2
        assert "sets another method than the one that is run, fed-sgd" in wrong.stderr


def test_a_sweep_takes_its_seeds_from_the_settings_on(tmp_path: Path) -> None:
    options = ("-m", "fed-lamb", "-g", "lr=.1,1.", "-s", "algorithm.weight_decay=.5", *SMALL)
    done = command("sweep", *options, "-s", "seed=5", "--seeds", "2", "-o", str(tmp_path / "s"))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "s/trials.jsonl").read_text().splitlines()]
    assert [(line["values"], line["seed"]) for line in lines] == [
        ({"lr": lr}, seed) for lr in (0.1, 1.0) for seed in (5, 6)
    ]
    facts = json.loads((tmp_path / "s/sweep.json").read_text())
    assert facts["settings"]["algorithms"]["fed-lamb"]["weight_decay"] == 0.5
    again = command("resume", str(tmp_path / "s"))
    assert again.returncode == 0, again.stderr


def test_signs_that_the_terminal_does_not_have_lose_nothing(tmp_path: Path) -> None:
    options = ("sweep", "-g", "lr=0.1", "--seeds", "2", *SMALL)
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "fedlamb", *options, "-o", str(tmp_path / "s")],
        env={**os.environ, **plain},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s/report.html").is_file()


def test_a_run_on_a_folder_of_data_goes_on_from_elsewhere(tmp_path: Path) -> None:
    write_idx(tmp_path / "here/img", pictures(600), pictures(60))
    options = ("-s", "data.name=img", "-s", "federation.rounds=1", "-o", "run")
    begun = command("run", *options, cache=tmp_path, cwd=tmp_path / "here")
    assert begun.returncode == 0, begun.stderr
    again = command("resume", "here/run", cache=tmp_path, cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = Path("runs/same-second")
    monkeypatch.setattr("fedlamb.cli.runs.new_name", lambda preset, kind: name)
    monkeypatch.setattr("fedlamb.cli.sweeps.new_name", lambda preset, kind: name)
    for command in (["run"], ["run"], ["sweep", "-g", "lr=0.01"]):
        done = CliRunner().invoke(app, [*command, "-m", "fed-lamb", "-s", "federation.rounds=1"])
        assert done.exit_code == 0, done.output
    there = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert there == ["same-second", "same-second-2", "same-second-3"]
    assert (tmp_path / "runs/same-second-3/sweep.json").exists()


@pytest.mark.parametrize("damaged", ["garbage\n", ""])
def test_a_report_of_damaged_metrics_says_so(damaged: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["-m", "fed-lamb", "-s", "federation.rounds=2", "--out", str(folder)]
    assert CliRunner().invoke(app, ["run", *options]).exit_code == 0
    page = (folder / "report.html").read_bytes()
    (folder / "metrics.jsonl").write_text(damaged)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert isinstance(done.exception, SettingError)
    assert "has 0 readable lines in metrics.jsonl for 2 finished rounds" in str(done.exception)
    assert (folder / "report.html").read_bytes() == page
