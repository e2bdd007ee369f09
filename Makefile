# The commands of the project. Each one first makes .venv what pyproject.toml and constraints.txt say.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Which build of torch: see docs/install.md for CUDA.
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip --disable-pip-version-check --no-input
PYTEST := $(RUN)/python -m pytest
STAMP := $(VENV)/.taut-installed

export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help venv wheel demo test test-core test-slow test-parallel test-cluster test-page test-cuda test-real test-artifacts test-versions lint format docs bench bench-dpo bench-grpo bench-vision bench-generate bench-checkpoint bench-check bench-plan bench-memory bench-launch gpu

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

venv: $(STAMP) ## create .venv with taut and its tools in it

# Most of the 22,000 modules are never imported: bytecode is written of those that are, by their first import.
$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile $(TORCH)
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	PYTHONDONTWRITEBYTECODE= $(RUN)/python -W ignore -c "import datasets, hypothesis, peft, taut.commands.train"
	touch $@

# From nothing: setuptools would put files that are no longer in src, but still in build, into the wheel.
wheel: $(STAMP) ## write dist/taut-VERSION-py3-none-any.whl, which pip installs anywhere
	rm -rf build dist
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

demo: $(STAMP) ## train a small real model for a few minutes and show what changed
	$(RUN)/python -m taut demo

QUICK := not real and not slow and not parallel and not cluster and not page and not cuda_stand_in
CORE := $(addprefix tests/unit/,attention data evals inference losses methods models plan rl run train vision test_config.py test_types.py) tests/invariants tests/golden tests/oracle
# Three and four at a time on two cores: many tests wait for processes and clocks.
test test-core test-slow test-parallel test-cluster test-page test-cuda: export OMP_NUM_THREADS := 1
# Threads that wait awake take the time of other tests.
test test-core test-slow test-parallel test-cluster test-page test-cuda test-real test-artifacts: export OMP_WAIT_POLICY := PASSIVE
# Bytecode is written, whatever the shell says: each worker would compile every test anew, each process they start taut.
test test-core test-slow test-parallel test-cluster test-page test-cuda test-real test-artifacts: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP) ## the tests that need no downloaded model, without what takes long (tests/helpers/quick.py); GPU tests run where there is a GPU
	$(PYTEST) -q -n 4 -m "$(QUICK)" $(ARGS)

test-core: $(STAMP) ## the part of make test for the inner loop: functions and numbers of what trains, without whole runs and tools
	$(PYTEST) -q -n 3 -m "$(QUICK)" $(CORE) $(ARGS)

test-slow: $(STAMP) ## the slow tests that need no downloaded model; .ci/run runs those whose sources changed since (tests/helpers/proven.py)
	$(PYTEST) -q -n 3 -p tests.helpers.proven -m "slow and not real and not cluster and not page" $(ARGS)

test-parallel: $(STAMP) ## every architecture and method on several meshes of ranks against one process
	$(PYTEST) -q -m parallel $(ARGS)

test-cluster: $(STAMP) ## runs on two and three simulated nodes of a Ray cluster, which die
	$(PYTEST) -q -m cluster $(ARGS)

test-page: $(VENV)/.taut-page-tests ## a browser opens the page of runs; skipped where there is no chromium
	$(PYTEST) -q -m page tests/tools/page/browser $(ARGS)

$(VENV)/.taut-page-tests: $(STAMP)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[page-tests]'
	touch $@

# Beside the other packages: torch would use it wherever it finds it. Without it, what Triton compiles is skipped.
test-cuda: $(STAMP) ## runs on a CUDA device that does not exist (tests/cuda_stand_in): methods, families, options, waits
	test -d $(VENV)/triton-for-tests || $(PIP) install --quiet --no-deps --target $(VENV)/triton-for-tests 'triton==3.7.*' || true
	$(PYTEST) -q -n 2 --all-cases tests/cuda_stand_in $(ARGS)

test-real: $(STAMP) ## tests on the small real model (run make demo once before), and on what other people made
	$(PYTEST) -q -m real $(ARGS)

test-artifacts: $(STAMP) ## the part of test-real on tokenizers, templates and renderers of other people that takes under three minutes
	$(PYTEST) -q -m "real and not slow" tests/real/test_artifacts.py tests/real/test_oracles.py $(ARGS)

test-versions: ## the oldest and the newest versions on each Python, in environments of their own; writes a table of docs/install.md
	$(PYTHON) tests/versions/run.py --write $(ARGS)

lint: $(STAMP) ## format, lint, types, import rules
	$(RUN)/ruff format --check .
	$(RUN)/ruff check --no-cache .
	$(RUN)/mypy
	$(RUN)/lint-imports

format: $(STAMP) ## rewrite the files as lint wants them, where that is mechanical
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

docs: $(VENV)/.taut-docs ## write the generated pages; build/docs
	$(RUN)/python -m tests.docs.pages
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --quiet

$(VENV)/.taut-docs: $(STAMP)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# Needs no .venv and no network: run by the Python that has torch.
# The python that has the machine's torch.
gpu: PYTHON = python3
gpu: ## taut on this machine's GPU: tests, speed, a report (PYTHON=... that has torch; ARGS=tests, bench, report, docs)
	$(PYTHON) benchmarks/gpu.py $(ARGS)

bench: $(STAMP) ## taut beside its peers, in one run
	$(RUN)/python benchmarks/sft.py $(ARGS)

bench-dpo: $(STAMP) ## taut beside TRL on pairs: speed, memory, and the same losses; half an hour on two quiet cores
	$(RUN)/python benchmarks/dpo.py $(ARGS)

bench-grpo: $(STAMP) ## taut beside TRL on roll-outs: a step's parts, memory, the same losses (run make demo once before)
	$(RUN)/python benchmarks/grpo.py $(ARGS)

bench-vision: $(STAMP) ## taut beside TRL on pictures with several questions each: speed, memory, the same losses
	$(RUN)/python benchmarks/vision.py $(ARGS)

bench-generate: $(STAMP) ## taut beside transformers' two ways to generate, in one run
	$(RUN)/python benchmarks/generate.py $(ARGS)

bench-checkpoint: $(STAMP) ## what saving costs a run of the 135M model (run make demo once before; 5 GB of disk)
	$(RUN)/python benchmarks/checkpoint.py $(ARGS)

bench-check: $(STAMP) ## what taut check costs on the 135M model (run make demo once before)
	$(RUN)/python benchmarks/check.py $(ARGS)

bench-plan: $(STAMP) ## what taut plan predicts against what is measured (run make demo once before)
	$(RUN)/python benchmarks/plan.py $(ARGS)

bench-launch: $(STAMP) ## seconds to the first step, and from a killed rank to the next: Ray beside torchrun
	$(RUN)/python -m benchmarks.launch $(ARGS)

bench-memory: $(STAMP) ## settings for little memory beside plain, transformers with peft, and TRL
	$(RUN)/python benchmarks/memory.py $(ARGS)
