# Needs only make and Python 3.11 or newer. Everything is installed into $(VENV); the stamps in it
# make each install run once and again whenever pyproject.toml changes.

VENV ?= .venv
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$python; break; fi; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# By path: a folder beside a script, such as a clone, is else taken for the package of its name.
EDITABLE := --config-settings editable_mode=compat --editable
QUESTION ?= Why is the sky blue? Answer in three sentences.

.PHONY: demo test test-slow kernels-aot smoke lint

# Fetches a small model once and streams its answer, with TTFT, TPOT and tokens/s.
demo: $(VENV)/.installed
	@$(BIN)/jaxinfer fetch smollm2-135m
	@echo "> $(QUESTION)"
	@$(BIN)/jaxinfer generate --model smollm2-135m --chat --stream --temperature 0 \
		--max-tokens 128 "$(QUESTION)"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'slow and not network and not gpu and not tpu'

# Every kernel by the real TPU compiler, which needs no TPU, and the table of it in the docs.
kernels-aot: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m aot tests/pallas_kernels --kernel-table docs/kernels_aot.md

# The device programs, for another Python or JAX: make smoke VENV=.venv-newest PYTHON=python3.13
smoke: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/compute/test_decoder.py tests/engine/test_executor.py \
		tests/engine/test_engine_fuzz.py tests/sched tests/checkpoint/test_loading.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found. Name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/pip
	@echo "Installing into $(VENV) ..."
	@$(PIP) $(EDITABLE) .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/pip
	@echo "Installing into $(VENV), with what the tests need ..."
	@$(PIP) $(EDITABLE) '.[dev]'
	@touch $@ $(VENV)/.installed
