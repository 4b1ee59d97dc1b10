# Every target sets itself up: .venv is made, or made again when what it depends on has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
TABLE ?=
K ?=
ARGS ?=
DOCS := .venv-docs

.PHONY: demo test test-all test-gpu kernel peers lint stale bench docs setup clean

# threads of torch that wait for each other sleep: spinning on cores that others use took seven times as long
demo test test-all: export OMP_WAIT_POLICY = PASSIVE
# some 150 processes of the tests import the package: compiled modules are kept, whatever the environment says
test test-all: export PYTHONDONTWRITEBYTECODE =

demo: $(STAMP)
	$(BIN)/saccade demo

test: lint stale
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu"

# every case of the tests that `test` samples, and every target of the compilers: for a release
test-all: lint
	EVERY_CASE=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -n 8 --dist loadgroup

# one kernel in under a minute: its contract in one dtype, its binaries and, on a GPU, its times before and after
kernel: $(STAMP)
	$(BIN)/python -m tools.kernel "$(K)" $(ARGS)

# the suites of other projects, from ../peers/<name>, with and without our functions in place of theirs
peers: $(STAMP)
	$(BIN)/python scripts/peers.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.prose

# which committed results are older than the kernels that they measure
stale: $(STAMP)
	$(BIN)/python benchmarks/run.py --stale

bench: $(STAMP)
	$(BIN)/saccade bench $(TABLE)

# an environment of its own, without torch, as docstrings are read from the sources
docs: $(DOCS)/.stamp
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "pip>=25.1"
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group docs
	@touch $@

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON="$(PYTHON)" scripts/setup.sh $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS) site out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
