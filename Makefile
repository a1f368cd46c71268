# Everything a user or a CI job runs. `make help` lists the targets.

PYTHON ?= python3
# The one place that pins torch. It is installed first, so that nothing else pulls another build.
# Another build of it: make setup TORCH="torch==2.13.0 --index-url URL".
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/installed
PATHS := src tests scripts benchmarks experiments

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow test-gpu check fmt results clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z%\/-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv with the package and its development tools (PYTHON=, TORCH=)

$(STAMP): pyproject.toml Makefile
	@command -v $(PYTHON) > /dev/null || \
		{ echo "$(PYTHON) is not there. Name a Python 3.11 or later: make setup PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but dotmoe needs 3.11 or later: make setup PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

quickstart: $(STAMP)  ## The whole method on a tiny model, without network
	$(BIN)/dotmoe quickstart

test: $(STAMP)  ## The quick tests
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4

test-slow: $(STAMP)  ## The tests that take minutes
	$(BIN)/python -m pytest -m slow

test-gpu: $(STAMP)  ## The tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

check: $(STAMP)  ## Lint, formatting, types and layers, changing nothing
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(STAMP)  ## Mend what can be mended by machine
	$(BIN)/ruff check --fix $(PATHS)
	$(BIN)/ruff format $(PATHS)

results: $(STAMP)  ## Measure the quickstart again, and put it into the README
	rm -rf quickstart-run
	$(BIN)/dotmoe quickstart
	cp quickstart-run/quickstart.json results/quickstart.json
	$(BIN)/python scripts/update_documents.py

results/%: $(STAMP)  ## Make what is missing of an experiment (results/tab_zero_shot_results)
	$(BIN)/python experiments/run.py $*

clean:  ## Remove .venv and every cache
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find $(PATHS) -name __pycache__ -type d -prune -exec rm -rf {} +
