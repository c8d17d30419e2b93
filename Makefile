# make demo, make test: everything from a bare clone, with python3 (3.11 or newer), pip and make.

PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
ARGS =
# Processes that share the tests; 0 runs them in one, which suits a debugger.
JOBS = auto

# Two targets at once would install into the same folder.
.NOTPARALLEL:
.PHONY: help demo test check docs lint format-check types imports format examples-env dev-env clean

help:
	@echo 'make demo     train a small GPT on real text under gpt_guard'
	@echo 'make test     run the tests'
	@echo 'make check    lint, format, types and the one-way imports'
	@echo 'make docs     build the site in build/site; each command and script on its pages is run'
	@echo 'make format   format the code and apply safe lint fixes'
	@echo 'make clean    remove the environment and all caches; keeps runs/'
	@echo
	@echo 'Each sets up $(VENV) first, where it has to.'
	@echo 'JOBS=N runs the tests in N processes (0: in one), by default in one for each core'
	@echo 'ARGS="..." is handed on:    make demo ARGS="--break nan"    make test ARGS="-k lr"'
	@echo 'PYTHON=... names a Python:  make demo PYTHON=python3.12'

demo: examples-env
	@$(BIN)/python examples/train_minigpt.py --out runs/demo $(ARGS)

test: dev-env
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: lint format-check types imports

# The variable leaves out an advertisement of the theme's.
docs: docs-env
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'built: build/site/index.html'

lint: dev-env
	@$(BIN)/ruff check .

format-check: dev-env
	@$(BIN)/ruff format --check .

types: dev-env
	@$(BIN)/mypy

# Its cache remembers modules that did not exist yet as if they were missing still.
imports: dev-env
	@$(BIN)/lint-imports --no-cache

format: dev-env
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

examples-env:
	@PYTHON=$(PYTHON) VENV=$(VENV) sh .ci/setup examples

docs-env:
	@PYTHON=$(PYTHON) VENV=$(VENV) sh .ci/setup docs

dev-env:
	@PYTHON=$(PYTHON) VENV=$(VENV) sh .ci/setup dev

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
