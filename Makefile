# Bare `make` lists the targets. Everything lives in .venv and .ablate below this folder.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TPU_VENV  := .venv-tpu
TPU_STAMP := $(TPU_VENV)/.installed
TPU_TESTS := tests/xla tests/kernels/test_mamba3_xla.py tests/kernels/test_xla_lies.py
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
COMPOSE ?= docker compose
export ABLATE_HOME ?= $(CURDIR)/.ablate
# Where an image sets it, each of hundreds of processes would compile this project's modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install lock demo up down status check fix docs golden test test-fast test-long test-kernels test-gpu tpu test-tpu nightly nightly-result release clients test-containers browser simulate bench-scale screens trainers chaos fleet troubles mutants interleavings bench-kernels fuzz fuzz-tpu fuzz-gpu fuzz-compile peer clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml requirements/project.lock requirements/torch-cpu.lock requirements/install.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "Python 3.11 or newer is needed, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Installing into $(VENV) (some minutes the first time)"
	@$(PYTHON) requirements/install.py $(VENV) service embedded worker mcp cpu dev
	@touch $@

$(TPU_STAMP): requirements/tpu.lock requirements/tpu-compiler.lock requirements/install_tpu.py requirements/cuda_stubs.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and \
	    "torch_xla 2.9 needs Python 3.11 to 3.13, $(PYTHON) is %d.%d; name another: make tpu PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Installing into $(TPU_VENV) (some minutes the first time)"
	@PJRT_DEVICE=CPU JAX_PLATFORMS=cpu $(PYTHON) requirements/install_tpu.py $(TPU_VENV)
	@touch $@

install: $(STAMP)  ## create .venv with everything

# One lock for every Python and platform. Versions stay as they are unless pyproject.toml or UPGRADE moves them.
LOCKED := service embedded worker mcp cpu cuda dev mlflow-server build lock
lock:  ## write requirements/project.lock anew: versions and digests of all packages; UPGRADE="--upgrade"
	@$(PYTHON) requirements/install.py --only $(VENV)/lock lock
	$(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --annotation-style line \
	    --custom-compile-command "make lock" $(LOCKED:%=--extra %) $(UPGRADE) pyproject.toml --output-file requirements/project.lock
	$(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --annotation-style line \
	    --custom-compile-command "make lock" $(UPGRADE) requirements/clients.in --output-file requirements/clients.lock

audit: $(STAMP)  ## known vulnerabilities of the locked packages; asks pypi.org, or SOURCE="-s osv" asks osv.dev
	$(BIN)/python -m venv .audit && .audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	.audit/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/project.lock $(SOURCE)

demo: $(STAMP)  ## run one real ablation from end to end, under 3 minutes after the installation
	@$(BIN)/ablate demo

up: $(STAMP)  ## start the embedded stack and keep it running
	@$(BIN)/ablate up

down: $(STAMP)  ## stop the embedded stack
	@$(BIN)/ablate down

status: $(STAMP)  ## show what runs and where
	@$(BIN)/ablate status

check: $(STAMP)  ## ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)  ## format and repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## write the generated pages: gates, settings, errors, spec, recipes
	$(BIN)/python -m tests.architecture.pages

golden: $(STAMP)  ## freeze REST interface, verdicts and readings of gates again, after a wanted breaking change
	$(BIN)/python -m tests.golden.freeze_readings
	$(BIN)/python -m tests.golden.freeze_openapi
	$(BIN)/python -m tests.golden.freeze_verdicts
	$(BIN)/python -m tests.golden.freeze_plans

browser:  # Chromium for the page tests, from the distribution, where we may install it
	@tests/install-browser.sh

# Idle OpenMP threads sleep: spinning ones would take the other process's core.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses 3 --dist loadscope --no-loadscope-reorder --durations 20 --ignore tests/containers
test: $(STAMP) browser  ## all tests that this machine can run but the long ones, in three processes
	$(PYTEST) --length short

test-long: $(STAMP) browser  ## the tests that make test leaves out (tests/long_tests.py), except those of kernels
	$(PYTEST) --length long --ignore tests/kernels --ignore tests/unit/model

test-kernels: $(STAMP)  ## the long tests that run kernels: without a GPU interpreted, or compiled and taken apart
	$(PYTEST) --length long tests/kernels tests/unit/model

test-fast: $(STAMP)  ## tests without servers, in one process: about seven minutes
	$(BIN)/python -m pytest tests/unit tests/architecture

# pytest-benchmark, where it is installed, warns beside other plugins, and warnings are errors.
test-gpu: $(STAMP)  ## tests that need an H100 or H200, after their kernels compile on all cores; without a GPU only that
	$(BIN)/python -m pytest -m gpu -p no:benchmark --compile-kernels --durations 20 tests/kernels tests/unit/model

tpu: $(TPU_STAMP)  ## create .venv-tpu, the environment of lane xla (torch 2.9, torch_xla, jax, libtpu), 3 GB

# XLA on the processors of this machine, in two processes by file. What needs a chip is skipped as such.
test-tpu: $(TPU_STAMP)  ## the tests of lane xla, in .venv-tpu; without a TPU on this machine's processors
	PJRT_DEVICE=$${PJRT_DEVICE:-CPU} JAX_PLATFORMS=cpu $(TPU_VENV)/bin/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder --durations 10 \
	    $(TPU_TESTS)

nightly: $(STAMP) $(TPU_STAMP)  ## compile every kernel with a budget; run test-long, test-kernels and test-tpu, store results in tests/nightly.json; commit it
	$(BIN)/python -m pytest --every-kernel tests/kernels/test_mamba3_cuda_budgets.py
	$(MAKE) chaos COUNT=12
	@$(BIN)/python -m tests.nightly

nightly-result: $(STAMP)  ## show these results; fails if a test failed, kernels/ has changed since those of kernels, or a run is older than 14 days
	@$(BIN)/python -m tests.nightly --show

# The wheel has what git has: the folder that is built has no leftovers of earlier builds. The tag is the last step.
release: $(STAMP)  ## wheel in dist/, images and tag of the version in pyproject.toml (docs/releases.md)
	@test -z "$$(git status --porcelain)" || { echo "there are uncommitted changes (git status); commit or remove them"; exit 1; }
	@! git rev-parse --quiet --verify refs/tags/v$(VERSION) >/dev/null || \
	    { echo "the tag v$(VERSION) exists; raise the version in pyproject.toml"; exit 1; }
	@grep -q '^## $(VERSION), 20' CHANGELOG.md || { echo "CHANGELOG.md has no heading '## $(VERSION), YYYY-MM-DD'; date it"; exit 1; }
	@rm -rf build/release && mkdir -p build/release && git archive HEAD | tar -x -C build/release
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist ./build/release
	ABLATE_VERSION=$(VERSION) $(COMPOSE) build
	git tag --annotate v$(VERSION) --message "Ablate $(VERSION)"

# The generators and their clients need other packages than this project, so they have an environment of their own.
clients: $(STAMP) requirements/clients.lock  ## generate clients of the REST interface with two generators; ask a question with each
	@$(PYTHON) -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/clients.lock
	@$(BIN)/python -m tests.clients $(VENV)/clients/bin

fuzz-tpu: $(TPU_STAMP)  ## random specs through the compiler of a TPU that is not here, minutes; FUZZ="--count 10 --seed 1"
	$(TPU_VENV)/bin/python -m tests.xla.random_specs $(FUZZ)

simulate: $(STAMP)  ## print how often verdicts are wrong, simulated through the judge; minutes
	$(BIN)/python -m tests.simulation

bench-scale: $(STAMP)  ## pages and submissions of one API process with 100,000 trials, 50 users, 50 workers, 50 streams
	$(BIN)/python -m tests.bench.scale $(SCALE)

# Real processes are killed, frozen, cut off and starved; then an independent checker reads what is left.
COUNT ?= 40
SEED ?= 1
STORE ?= both
chaos: $(STAMP)  ## break a whole installation COUNT times on each STORE (sqlite, postgresql, both) and check its books; SEED=1
	$(BIN)/python -m tests.chaos --count $(COUNT) --seed $(SEED) --store $(STORE) $(CHAOS)

fleet: $(STAMP)  ## an ablation of BLOCKS (60) blocks on NODES (8) nodes of a real Slurm with TROUBLES (200) of its jobs; 25 minutes; SEED=1
	$(BIN)/python -m tests.fleet --blocks $(or $(BLOCKS),60) --nodes $(or $(NODES),8) --troubles $(or $(TROUBLES),200) --seed $(SEED)

troubles: $(STAMP)  ## run 40 drawn programs of trouble COUNT times through a stack; check values and leftovers; SEED=1 COUNT=500
	$(BIN)/python -m tests.troubles --count $(COUNT) --seed $(SEED)

# mutmut is not in the lock: nothing else needs it. It works in mutants/ and continues a run there.
BASE ?= main
MUTATED := git diff --name-only --diff-filter=d $(BASE) -- 'experiments/analysis/*.py' 'service/store/*.py' 'workers/leases/*.py'
mutants: $(STAMP)  ## mutate files of judge, store and leases that changed since BASE (main); print what no test finds; hours
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check mutmut==3.8.1
	$(BIN)/mutmut run $$($(MUTATED) | grep -v migrations | sed 's|/|.|g; s|py$$|*|')
	$(BIN)/mutmut results

interleavings: $(STAMP)  ## on PostgreSQL, do each operation before every statement of each other one; an hour or two; SEED=1
	$(BIN)/python -m tests.interleavings --seed $(SEED) $(INTERLEAVINGS)

trainers: $(STAMP)  ## ablate trainers from PyPI as commands: nothing, a slow-down, other numerics, lies; 2 hours; TRAINERS="--only litgpt"
	$(BIN)/python -m tests.trainers .trainers $(TRAINERS)

screens: $(STAMP) browser  ## take the pictures of the pages for the documentation, into docs/screens
	$(BIN)/python -m tests.bench.screens

bench-kernels: $(STAMP)  ## on an H100 or H200: accuracy and speed of the kernels and the official ones, as a receipt
	$(BIN)/python -m tests.kernels.bench $(if $(ABLATE_PEER_SITE),--peer-site '$(ABLATE_PEER_SITE)') $(BENCH)

fuzz: $(STAMP)  ## random problems through the CUDA kernels, interpreted on this CPU; FUZZ="--count 100 --seed 0"
	$(BIN)/python -m tests.kernels.fuzz_on_cpu $(FUZZ)

fuzz-gpu: $(STAMP)  ## on an H100 or H200: 1,000 random problems, each right or refused; FUZZ="--count 1000 --seed 0"
	$(BIN)/python -m tests.kernels.fuzz $(FUZZ)

fuzz-compile: $(STAMP)  ## compile every shape and switch that the kernels allow, without a GPU, hours; FUZZ="--count 50"
	$(BIN)/python -m tests.kernels.fuzz.compiling $(FUZZ)

# The official kernels, in a folder of their own: their TileLang and ours cannot share one. setup.py needs wheel.
PEER_PINS := tilelang==0.1.8 apache-tvm-ffi==0.1.9 z3-solver==4.15.4.0 einops==0.8.2
# PEER is a git checkout, whose last commit is installed and named in the version: 2.3.2.post1+ge9594ce1c732.
PEER_SOURCE = $(if $(PEER),git+file://$(abspath $(PEER)),mamba-ssm==2.3.2.post1)
PEER_COMMIT = $(if $(PEER),g$(shell git -C '$(PEER)' rev-parse --short=12 HEAD))
peer: $(STAMP)  ## install the official Mamba-3 kernels for lane peer into .peer, or those of a checkout: PEER=path
	$(BIN)/python -m pip install --quiet --disable-pip-version-check wheel setuptools packaging
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .peer $(PEER_PINS)
	rm -rf .peer/mamba_ssm*
	MAMBA_LOCAL_VERSION=$(PEER_COMMIT) MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(BIN)/python -m pip install \
	    --quiet --disable-pip-version-check --no-deps --no-build-isolation --upgrade --target .peer '$(PEER_SOURCE)'

clean:  ## stop the stack; remove .venv and the stack's state
	@if [ -x $(BIN)/ablate ]; then $(BIN)/ablate down; fi
	rm -rf $(VENV) $(ABLATE_HOME)

test-containers: $(STAMP)  ## run compose.yaml with an ablation in it; images must be built (docker/README.md)
	$(BIN)/pytest -p no:xdist tests/containers -q -rs
