# `make demo` and `make test` set up all they need on a fresh machine with Python 3.11 or newer, then run.
#
#   make demo     text-to-SQL on the embedded model, about five minutes on two CPU cores; writes demo-out/
#   make test     lint, type check, unit, contract and end-to-end tests
#   make lint     format and lint checks, type check
#   make bench    tokens a second against plain transformers + PEFT
#   make clean    remove the environment and everything built or written here
#
# Variables:
#   VENV          where the virtual environment goes
#   PYTHON        the Python that makes it
#   TORCH         what to install as PyTorch where it is absent. The default is right for a machine without a GPU; on
#                 a GPU machine pick the build for your driver: make demo TORCH="torch --index-url URL-OF-THE-BUILD"
#   ARGS          more options for demo, bench or pytest: make demo ARGS="--rl-steps 20"

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL := smollm2-135m-instruct

# Idle OpenMP threads would spin and take the cores from the other process: server and client share this machine.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/openrl models pull $(MODEL)
	$(BIN)/python -m openrl_recipes.demo $(ARGS)

test: lint
	$(BIN)/openrl models pull $(MODEL)
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.dev
	$(BIN)/openrl models pull $(MODEL)
	$(BIN)/openrl bench $(ARGS)

# The environment, in three steps; each runs again only when pyproject.toml changed.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "OpenRL needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .ruff_cache .hypothesis
