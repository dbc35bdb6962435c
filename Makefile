# make demo   environment, install, the six methods side by side, a table and report.html
# make test   the whole test suite
# make check  lint, format and types
# make bench  other simulators beside this one (DATA=the folder that holds mnist/; an hour or so)
# A second call starts at once.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.ready-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check bench format clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/fedlamb compare

# One thread in each process: two would wait for each other where more than that is at work.
test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/simulators.py $(if $(DATA),--data-root $(DATA))

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedlamb needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "Making the environment in .venv and installing (a minute or more) ..."
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[data,report,paper]'
	@touch $@

$(DEV): $(READY)
	@echo "Installing the tools for development ..."
	$(PIP) --editable '.[data,report,paper,dev]'
	@touch $@
