# Every word sets up what it needs in .venv on a fresh machine, and is quick when that is done.
#   make run ARGS='--prompt "Once upon a time"'      make test ARGS=tests/scheduler
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run test check bench setup

ARGS ?=
BIN := .venv/bin
READY := .venv/.ready

help: ## these lines
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(READY) ## plan, stream and account for the bundled model
	$(BIN)/hetero-runtime run $(ARGS)

test: $(READY) ## the default tests: no GPU, no download
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu and not slow" $(ARGS)

check: $(READY) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## the benches that need no GPU
	$(BIN)/python -m bench --device cpu $(ARGS)

setup: $(READY)

$(READY): pyproject.toml constraints.txt .ci/setup
	@.ci/setup
