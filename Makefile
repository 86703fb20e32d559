# Everything runs from an environment of its own in .venv; `make demo` and `make test` build it when it is missing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

# One thread per process: ranks are processes, and results must not depend on how many cores there are.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MPLBACKEND=Agg
# Two tests at a time; JOBS=0 runs them one by one, in this process.
JOBS     ?= 2
PYTEST   := $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## build .venv (skipped while pyproject.toml and constraints.txt are unchanged)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Tessera needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing torch (the largest download) ..."
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@echo "installing Tessera ..."
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,triton,hf]'
	@touch $@

demo: setup ## cost, plan, train and compare the small hybrid model on 4 local ranks
	$(BIN)/tessera train examples/hybrid_tiny.yaml --demo

test: setup lint ## lint, typing and all tests but the long ones
	$(PYTEST) -m "not slow"

test-slow: setup ## the long tests
	$(PYTEST) -m slow || [ $$? -eq 5 ] # 5: there was none to run

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff fix and format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## run every bench/bench_*.py
	@set -e; for file in $(wildcard bench/bench_*.py); do echo "== $$file"; $(BIN)/python $$file; done

clean: ## remove caches and build products (keeps .venv and runs)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -path ./$(VENV) -prune -o -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +
