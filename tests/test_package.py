"""The package itself: its names, its data, and what it must never do."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import fedlamb as fl

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_all_is_sorted_and_exact():
    order = lambda name: (not name.isupper(), not name[0].isupper(), name)  # noqa: E731
    assert fl.__all__ == sorted(fl.__all__, key=order)  # constants, classes, functions
    public = {n for n, v in vars(fl).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == set(fl.__all__)


def test_no_pickle_and_nothing_from_the_network():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if (path.name, name) == ("workers.py", "socket"):
                    continue  # a free port on this machine, where its workers meet
                assert name.split(".")[0] not in {"pickle", "requests", "urllib", "socket", "http"}
        assert not re.search(r"torch\.(load|save)\(|allow_pickle", path.read_text()), path


def test_import_needs_no_extra():
    """The core runs where plotly is not installed."""
    code = (
        "import sys; sys.modules['plotly'] = None; sys.modules['sklearn'] = None\n"
        "import fedlamb, fedlamb.cli; from fedlamb.report import page\n"
        "assert not page.available(); fedlamb.digits()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_embedded_digits_are_scikit_learn_s():
    theirs = load_digits()
    data = fl.digits()
    images = torch.cat([data.train[0], data.test[0]]).numpy()[:, 0] * 16
    labels = torch.cat([data.train[1], data.test[1]]).numpy()
    order = np.random.default_rng(0).permutation(1797)
    assert np.array_equal(images, theirs.images[order])
    assert np.array_equal(labels, theirs.target[order])


def test_an_algorithm_file_reads_like_the_paper():
    for path in (ROOT / "src/fedlamb/algorithms").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 125, path


def test_the_seventh_algorithm_takes_under_40_lines():
    text = (ROOT / "examples/write_your_own_algorithm.py").read_text()
    body = text[text.index("class Model") : text.index("if __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) < 40
