"""The report in a real browser: six curves, a table, no network, no errors."""

import os
import random
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

import fedlamb as fl
from fedlamb.cli import runs
from fedlamb.report.sweep_page import _along_the_grid, _best_curves, ranked, write_sweep_page

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    changes = ["split.clients=8", "model.hidden=[8]", "federation.rounds=4"]
    runs.compare(preset="digits", methods=None, changes=changes, out=folder)
    return folder / "report.html"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_six_curves_and_a_table_in_a_browser(report):
    state = random.getstate()  # the browser's driver draws from it
    requests: list[str] = []
    problems: list[str] = []
    with sync_playwright() as playwright:
        flags = ["--disable-background-networking"] + ["--no-sandbox"] * (os.geteuid() == 0)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page()
        page.on("request", lambda r: requests.append(r.url))
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.goto(report.as_uri())
        page.wait_for_selector("#chart-3 .scatterlayer .trace")
        for chart in ("chart-1", "chart-2", "chart-3"):
            assert page.locator(f"#{chart} .scatterlayer .trace").count() == 6
            names = page.locator(f"#{chart} .legendtext").all_text_contents()
            assert names == list(fl.ALGORITHMS)
        cells = page.locator("table tbody tr td:first-child").all_inner_texts()
        assert cells == list(fl.ALGORITHMS)
        browser.close()
    random.setstate(state)
    assert problems == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)


def test_the_page_escapes_what_it_shows(tmp_path):
    title = "<script>alert(1)</script>"
    changes = ["split.clients=8", "federation.rounds=1", f"title={title}"]
    runs.compare(preset="digits", methods=["fed-sgd"], changes=changes, out=tmp_path / "run")
    text = (tmp_path / "run/report.html").read_text()
    assert title not in text
    assert "&lt;script&gt;alert(1)" in text


def test_without_plotly_the_run_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fedlamb.report.page.available", lambda: False)
    changes = ["split.clients=8", "federation.rounds=1"]
    runs.compare(preset="digits", methods=["fed-sgd"], changes=changes, out=tmp_path / "run")
    assert "pip install 'fedlamb[report]'" in capsys.readouterr().out
    assert not (tmp_path / "run/report.html").exists()


def trial(lr, decay, seed, *accuracies, **more):
    return {
        "values": {"lr": lr, "weight_decay": decay},
        "seed": seed,
        "status": "finished",
        "best_accuracy": max(accuracies),
        "final_accuracy": accuracies[-1],
        "test_accuracy": list(accuracies),
        **more,
    }


def test_a_sweep_is_ranked_by_its_mean_over_seeds_and_drawn_along_its_grid(tmp_path):
    trials = [
        trial(0.01, 0.0, 0, 0.2, 0.6),
        trial(0.1, 0.0, 0, 0.9, 0.3),
        trial(0.01, 0.0, 1, 0.3, 0.8),
        trial(0.1, 0.0, 1, 0.1, status="diverged"),
        trial(0.1, "<b>", 0, 0.75, 0.75),
    ]
    points = ranked(trials)
    assert [(p.values["lr"], p.best) for p in points] == [
        (0.1, [0.75]),
        (0.01, [0.6, 0.8]),
        (0.1, [0.9, 0.1]),
    ]
    assert points[1].cells() == ("0.01", "0.0", "70.0 ± 14.1 %", "70.0 ± 14.1 %", "2")
    assert points[2].cells()[-2] == "diverged"
    grid = {"lr": [0.01, 0.1], "weight_decay": [0.0, "<b>"]}
    along, curves = _along_the_grid(grid, points), _best_curves(points)
    assert along.layout.xaxis.type == "log"
    assert [list(line.x) for line in along.data] == [[0.01, 0.1], [0.1]]
    assert list(along.data[0].y) == pytest.approx([0.7, 0.5])
    assert list(along.data[0].error_y.array) == pytest.approx([0.1, 0.4])
    assert [len(line.x) for line in curves.data] == [2, 2, 1]
    assert list(curves.data[1].y) == pytest.approx([0.25, 0.7])
    facts = {
        "method": "fed-lamb",
        "grid": grid,
        "seeds": 2,
        "settings": {"title": "", "data": {"name": "digits"}, "federation": {"rounds": 2}},
    }
    write_sweep_page(tmp_path / "report.html", facts, trials)
    text = (tmp_path / "report.html").read_text()
    assert "<td>&lt;b&gt;</td>" in text
    assert "Sweep: fed-lamb" in text
    assert "3 points of the grid, 2 rounds, n = 2 for each point; mean ±" in text
