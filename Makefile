# `make help` lists the targets. Tools are in .venv, runs in runs/; `format` rewrites the code, `bench` results/bench.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install train plan test check format bench clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

install: $(INSTALLED) ## create .venv and install the package with its tools

train: $(INSTALLED) ## train on handwritten digits (ARGS="mode=dp seed=1" changes what)
	$(BIN)/cdp-train $(ARGS)

plan: $(INSTALLED) ## show timeline, stages and memory before training (ARGS="...")
	$(BIN)/cdp-plan $(ARGS)

test: $(INSTALLED) ## run all tests
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

check: $(INSTALLED) ## lint, formatting, layers, types, and that the report is what the rows give
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/cdp-report check

format: $(INSTALLED) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## run the benches of docs/benchmarks.md (servers and links need root); rewrites results/bench
	$(BIN)/python scripts/bench.py $(ARGS)

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
