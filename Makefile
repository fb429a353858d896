# Bare `make` lists the targets. Everything lives in .venv and .ablate below this folder.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export ABLATE_HOME ?= $(CURDIR)/.ablate

.DEFAULT_GOAL := help
.PHONY: help install demo up down check fix test bench-api browser clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable '.[service,embedded,worker,cpu,dev]'
	@touch $@

install: $(STAMP)  ## create .venv with everything (a few minutes the first time)

demo: $(STAMP)  ## run the catalog ablation `demo` on this machine, end to end, under 3 minutes
	$(BIN)/ablate demo

up: $(STAMP)  ## start the embedded stack and keep it running
	$(BIN)/ablate up

down: $(STAMP)  ## stop the embedded stack
	$(BIN)/ablate down

check: $(STAMP)  ## ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)  ## format and repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

browser:  # Chromium for the page tests, from the distribution, where we may install it
	@tests/install-browser.sh

test: $(STAMP) browser  ## all tests that this machine can run
	$(BIN)/python -m pytest

bench-api: $(STAMP)  ## POST /v1/ablations against a bare endpoint that inserts the same rows
	$(BIN)/python -m tests.bench.api

clean: down  ## remove .venv and the embedded stack's state
	rm -rf $(VENV) $(ABLATE_HOME)
