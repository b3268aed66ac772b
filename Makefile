# `make demo` and `make test` need python3.11 or newer, pip and make; everything else is set up in .venv, without root.

CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python)
# The first candidate that really runs and is new enough (a shim may exist and yet not run).
FIND_PYTHON = for p in $(CANDIDATES); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; exit 0; }; done; \
	echo "Slipstream needs python 3.11 or newer; none of: $(CANDIDATES). Name one: make PYTHON=/path/to/python" >&2; exit 1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Without --no-compile pip spends a minute compiling modules that are never imported.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
# What is imported is compiled once, then: with this set, as in many containers, each process would do it again.
unexport PYTHONDONTWRITEBYTECODE
# The CPU build of torch: 0.2 GB instead of several with the CUDA libraries.
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test quick mutants nightly nightly-layouts nightly-fresh nightly-sglang nightly-chaos lint docs setup lock clean

help:
	@echo "make demo   train a small model from scratch, first supervised, then by asynchronous PPO (6 to 10 minutes)"
	@echo "make test   run the test suite (PYTEST_ARGS='tests/rollout' for a part)"
	@echo "make quick  run the tests that start neither Ray nor trainer ranks"
	@echo "make mutants  break promises and changed lines on purpose and run the tests (docs/testing.md)"
	@echo "make nightly  what continuous integration leaves out (docs/testing.md)"
	@echo "make lint   ruff and mypy"
	@echo "make docs   build the documentation as a site in site/, with its links checked"
	@echo "make setup  only create $(VENV)"
	@echo "make lock   write the versions of $(VENV) to constraints.txt"
	@echo "make clean  remove $(VENV) and the demo's output"

demo: $(STAMP)
	$(BIN)/python -m tools.demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

quick: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not slow and not nightly'

mutants: $(STAMP)
	$(BIN)/python -m tools.mutants $(MUTANTS_ARGS)
	$(BIN)/python -m tools.mutants --changed main

# All parts run with `make -k nightly`, also after one has failed. A layout has up to eight ranks.
nightly: nightly-layouts nightly-fresh nightly-sglang nightly-chaos mutants

nightly-layouts: $(STAMP)
	$(BIN)/python -m pytest -m nightly -n 1 --dist loadfile

nightly-fresh: $(STAMP)
	SLIPSTREAM_TEST_FRESH=1 $(BIN)/python -m pytest -n 0 tests/core/experiments tests/core/processes/test_attempts.py \
		tests/core/train

nightly-sglang: $(STAMP)
	@test -n "$$SLIPSTREAM_SGLANG_ENV" || { echo "left out: SLIPSTREAM_SGLANG_ENV is not set"; exit 0; }; \
	$(BIN)/python -m pytest -n 0 tests/rollout/inference/sglang tests/core/experiments/test_ppo_sglang.py \
		tests/core/planning/test_server_rates.py tests/tools/test_eval_sglang.py

nightly-chaos: $(STAMP)
	$(BIN)/python -m tools.chaos --kills 50 --seed 7
	$(BIN)/python -m tools.chaos --workflow agent --kills 20 --seed 7
	$(BIN)/python -m tools.chaos --mode split --kills 20 --seed 7
	@ls -d /usr/lib/postgresql/*/bin >/dev/null 2>&1 || { echo "left out: no PostgreSQL server is installed"; exit 0; }; \
	$(BIN)/python -m tools.chaos --mode split --postgres --kills 20 --seed 7

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

setup: $(STAMP)

# Versions of this environment, without the local part of CPU builds (torch==2.13.0+cpu).
lock: $(STAMP)
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

# A Python without ensurepip still makes an environment: the outer pip then installs pip into it.
# pip 23, which comes with Python 3.11, takes twice as long as a new one; it stays where no new one can be had.
# torch goes in next, alone: the only look-up at the index of CPU builds (pip skips that index where it is unreachable).
$(STAMP): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { python=$$($(FIND_PYTHON)) || exit 1; \
	echo "Setting up $(VENV) with $$python (once; takes a few minutes)"; \
	"$$python" -m venv $(VENV) >/dev/null 2>&1 || { \
		"$$python" -m venv --clear --without-pip $(VENV) && \
		"$$python" -m pip --python $(BIN)/python install -qq pip; }; }
	@$(PIP) --upgrade pip 2>/dev/null || true
	@$(PIP) --no-deps --retries 0 --extra-index-url $(TORCH_INDEX) "$$(sed -n '/^dependencies/,/^]/s/^    "\(torch[^"]*\)".*/\1/p' pyproject.toml)"
	@$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs/demo site
