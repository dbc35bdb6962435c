"""The paper's figures, by one command."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE
from rich.table import Table

from ..errors import SettingError, unknown_name
from ..experiment import device_of
from ..records import environment, locked
from ..report.table import spread
from ..reproduce.panels import METHODS, panels_of
from ..reproduce.results import (
    Results,
    accuracies,
    choose,
    final_lines,
    first_round_at,
    of_curve,
)
from ..reproduce.running import experiment_of, run_groups
from ..reproduce.side_by_side import Workers
from ..reproduce.study import (
    Group,
    Wanted,
    expected_after_grid,
    next_groups,
    searches,
    tuned_values,
)
from ..reproduce.trials import Bench
from ..settings import Engine
from ..simulate.sweep import Together
from ..simulate.work import assignments
from .display import console, decoding, progress, stop_at_once
from .options import DataRoot, Device
from .workers import seconds_of_clients


def reproduce(
    figure: Annotated[
        str,
        typer.Argument(
            metavar="FIGURE",
            help="fig2 (IID), fig3 (non-IID), fig4 (ResNet-18), table1, fig5 (lazy "
            "synchronisation), fig6 (n = 200), the studies eps, first-round, allocation and norm, "
            "or all.",
        ),
    ],
    panel: Annotated[
        str | None, typer.Option("--panel", help="One panel of it, such as mnist-mlp-1.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Comma-separated; by default all.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, 2 and so on.")] = 3,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="By default the paper's: 50, or 100.")
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Tune on the paper's grids, even where tuned rates come along."
        ),
    ] = False,
    select: Annotated[
        Literal["test", "validation"],
        typer.Option(
            help="Rates chosen by best test accuracy, as in the paper, or by the last accuracy on "
            "a twelfth of the training set that is held out, for which few rates come along."
        ),
    ] = "test",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, and for how long.")
    ] = False,
    results: Annotated[
        Path, typer.Option(help="Where finished trials are kept, and looked for.")
    ] = Path("paper/results"),
    data_root: DataRoot = None,
    device: Device = None,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Compile local steps; pays for whole panels on a GPU."),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Trials side by side, in a process each: on a CPU, and those of ResNet-18 on a "
            "GPU, where trials of small models run as one program anyway.",
        ),
    ] = 1,
) -> None:
    """Reproduce the paper's figures: run what is not done yet, and print the table.

    fig2 (IID) and fig3 (non-IID) have the panels mnist-mlp-1, mnist-cnn-1, fmnist-cnn-1 and, with
    3 local epochs, mnist-mlp-3, mnist-cnn-3, fmnist-cnn-3; fig4 and table1 (ResNet-18)
    cifar10-resnet18, cifar10-resnet18-iid, tiny-resnet18; fig5 (lazy synchronisation)
    mnist-cnn-lazy, fmnist-cnn-lazy; fig6 (n = 200) mnist-cnn-200, fmnist-cnn-200. Beside the paper:
    eps (mnist-mlp-1, mnist-cnn-noniid), first-round (mnist-mlp-1), allocation (mnist-mlp-fixed) and
    norm (cifar10-group-iid, cifar10-group-noniid).

    Finished trials lie in the results folder, a line each, and are never run again, those that
    come with the project neither: with a --results folder of your own, all is run here. After a
    kill, the same command goes on to the same table. Several panels may run side by side. Where no
    tuned rates come along, the paper's grids are searched first. Where other programs keep the
    cores busy, --workers 2 or OMP_NUM_THREADS=1 is several times as fast. python paper/draw.py
    --results FOLDER --out FOLDER draws it.

    Example: fedlamb reproduce fig2 --panel mnist-mlp-1 --seeds 1 --rounds 10 --results my-results
    """
    panels = panels_of(figure, panel)
    chosen = [name.strip() for name in (methods or "").split(",") if name.strip()]
    for name in chosen:
        if name not in METHODS:
            raise unknown_name("--methods", name, METHODS)
    file = next((p for p in (results, *results.parents) if p.exists() and not p.is_dir()), None)
    if file is not None:
        raise SettingError("--results", str(results), f"must be a folder; {file} is a file")
    place = Results(results)
    engine: dict[str, Any] = {
        "device": device or "auto",
        "compile": compile,
        "root": None if data_root is None else str(data_root.absolute()),
    }
    wanted = []
    for one in panels:
        curves = tuple(c for c in one.curves if not chosen or c.method in chosen)
        if curves:
            wanted.append(Wanted(one, curves, rounds or one.rounds, seeds, select, tune))
    if not wanted:
        there = dict.fromkeys(curve.method for one in panels for curve in one.curves)
        names = ", ".join(one.id for one in panels)
        right = f"names none of those in {names}; choose from {', '.join(there)}"
        raise SettingError("--methods", methods, right)
    if not results.exists():
        console.print(f"Nothing has been run yet in {results}", soft_wrap=True)
    if dry_run:
        _say_what(wanted, place, engine, workers)
        return
    results.mkdir(parents=True, exist_ok=True)
    try:
        for part in wanted:
            with locked(place.path(part.panel)), stop_at_once():
                _run(part, place, engine, workers)
            _show(part, place)
    except KeyboardInterrupt:
        console.print("Stopped; what is done is kept, and the same command goes on from there.")
        raise typer.Exit(code=130) from None
    console.print(f"Results: {results}", soft_wrap=True)


def _run(wanted: Wanted, place: Results, engine: dict[str, Any], workers: int) -> None:
    console.print(f"{wanted.panel.title} ({wanted.panel.id})")
    name = wanted.panel.settings["data"]["name"]
    with decoding(name) as told, progress() as shown, Workers(workers) as crowd:
        begun = ""
        alone = Bench(_together(engine["compile"]), shown.client)
        bench = crowd if workers > 1 and _apart(wanted, engine) else alone

        def on_round(name: str, done: int, total: int, best: float | None) -> None:
            nonlocal begun
            if name != begun:
                begun = name
                shown.begin(name, total, 0)
            if done:
                shown.rounds(done, best)

        if not next_groups(wanted, place):
            console.print(f"Nothing to run: all trials are in {place.path(wanted.panel)}")
        while groups := next_groups(wanted, place):
            begun = ""
            run_groups(wanted, groups, place, engine, bench, on_round, told)


def _apart(wanted: Wanted, engine: dict[str, Any]) -> bool:
    """Whether trials may run in processes of their own."""
    return wanted.panel.large or device_of(Engine(device=engine["device"])).type == "cpu"


def _together(compile: bool) -> Together:
    """Compiled, all groups of trials run by the same programs, three at once: 75 small models fill
    a GPU, and grids and seeds come in threes."""
    return Together(compile, at_once=3 if compile else None)


def _say_what(wanted: list[Wanted], place: Results, engine: dict[str, Any], workers: int) -> None:
    """What is left, its steps, and an estimate from a round of each panel, on a CPU a step."""
    table = Table(title="To be run", title_justify="left")
    for heading in ("method", "stage", "trials", "rounds", "steps", "about"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    total, stages_now = 0.0, set[str]()
    for one in wanted:
        each: tuple[int, float] | None = None
        groups = next_groups(one, place)
        if groups:
            table.add_section()
            table.add_row(one.panel.id, style="bold")
        for group in groups:
            each = each or _measured(one, group, engine)
            stages_now.add(group.stage)
            stages = [(group.stage, len(group.points), group.rounds)]
            if group.stage == "grid":  # how many points go on is not known yet
                stages += expected_after_grid(one)
            for stage, trials, rounds in stages:
                seconds = trials * rounds * each[1]
                total += seconds
                steps = f"{trials * rounds * each[0]:,}"
                cells = (group.label, stage, str(trials), str(rounds), steps)
                table.add_row(*cells, _time(seconds))
    if not table.row_count:
        console.print(f"Nothing to run: all trials are in {place.folder}")
        return
    console.print(table)
    where = environment()["gpu"] or "this CPU"
    about = [f"About {_time(total)} on {where}, trial by trial; together on a GPU they take less."]
    if workers > 1 and any(_apart(one, engine) for one in wanted):
        about.append(f"With {workers} workers on cores enough, up to {workers} at a time.")
    if engine["compile"] and where == "this CPU":
        about.append("Timed without compiling.")
    if "grid" in stages_now:
        about.append("Five points of each grid, of ResNet-18's two, are reckoned to go on.")
    if "whole" in stages_now:
        about.append("Rates beside the best whole run, and the best under more seeds, may follow.")
    console.print(" ".join(about))


def _measured(wanted: Wanted, group: Group, engine: dict[str, Any]) -> tuple[int, float]:
    """Local steps of a round, and its seconds."""
    values, seed = group.points[0]
    group = group._replace(rounds=max(2, group.rounds))
    experiment = experiment_of(wanted.panel, group, seed, wanted.select, engine)
    with decoding(experiment.data.name) as told:
        ((_, _, run),) = Bench(Together()).points(group.method, [(values, experiment)], told)
    work = assignments(run.plan, 1, run.task.augments, run.weighting)
    steps = sum(len(each.sizes) for each in work)
    console.print(f"Timing {wanted.panel.id} …")
    if run.task.device.type == "cpu":  # a round of a large model may take an hour
        return steps, seconds_of_clients(run, work, timed=1)
    next(run)
    begun = time.perf_counter()
    next(run)
    return steps, time.perf_counter() - begun


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _show(wanted: Wanted, place: Results) -> None:
    look: dict[str, Any] = {"box": SIMPLE, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=wanted.panel.title, title_justify="left", **look)
    table.add_column("method", max_width=len("mime-lamb,"))
    table.add_column("rates", min_width=len("weight_decay=0.01"))  # 80 columns hold the whole table
    for heading in ("best, %", "final, %", "to\n90 %", "seeds", "tuning\nruns"):
        table.add_column(heading, justify="right", no_wrap=True)
    trials = place.trials(wanted.panel)
    for curve in wanted.curves:
        lines = of_curve(trials, curve, wanted.select)
        searched = searches(wanted, curve, place)
        if searched:
            choice = choose(lines, wanted.rounds, wanted.select)
            values = choice.values if choice else None
        else:
            values = tuned_values(wanted, curve, place)
        own = final_lines(lines, values, wanted.rounds, wanted.seeds)
        if values is None or not own:
            continue
        rates = ", ".join(f"{k}={v}" for k, v in values.items() if k not in curve.fixed)
        tuning = str(len(lines)) if searched else "-"
        table.add_row(
            curve.label,
            rates,
            spread([max(accuracies(x), default=0.0) for x in own]).removesuffix(" %"),
            spread([(accuracies(x) or [0.0])[-1] for x in own]).removesuffix(" %"),
            str(first_round_at(own, 0.9) or "-"),
            str(len(own)),
            tuning,
        )
    console.print(table)
