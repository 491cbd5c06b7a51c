# Three commands a newcomer needs: `make train`, `make check` and `make test`. All set up .venv on their own.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: train check test format setup clean

train: $(STAMP)  ## train a tiny chess model on every local device
	$(BIN)/shardwise train configs/chess-tiny.yaml --fresh

# Files in the order that tests/conftest.py gives them. With bytecode, which the processes that tests start share. One worker
# more than cores: tests of ranks that hang wait, and leave a core idle.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
PYTEST  := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
STATIC  := $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

check: $(STAMP)  ## formatting, types, quick tests
	$(STATIC)
	$(PYTEST) -q -m quick

test: $(STAMP)  ## formatting, types, all tests
	$(STATIC)
	$(PYTEST)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(STAMP)

# torch first and alone: with the tested torch in place, no other package pulls in a newer build of it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("shardwise needs Python 3.11 or newer; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lm,medical,cells,images,track,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
