SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint test-kernels compile-gpu test-system test-min-jax test-long lock wheel gpu-bundle clean setup setup-dev

# Any of these locks will do, and what .venv already holds is kept. DEVICE=cuda12 or DEVICE=cuda13 asks for jax with an NVIDIA GPU.
ifneq ($(filter-out cuda12 cuda13,$(DEVICE)),)
  $(error DEVICE is cuda12 or cuda13, not $(DEVICE))
endif
RUN_LOCKS := $(or $(DEVICE),base dev cuda12 cuda13)
TEST_LOCKS := $(or $(DEVICE),dev cuda12 cuda13)
SETUP := bash scripts/setup_venv.sh
# A file's tests stay in one process, in the order of the areas; JOBS=0 runs all in one.
JOBS ?= 2
IN_PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
PYTEST := .venv/bin/python -m pytest

# The prompt as typed, dollar signs and quotes included.
override PROMPT := $(value PROMPT)
export PROMPT

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

setup:
	@$(SETUP) .venv $(RUN_LOCKS)

setup-dev:
	@$(SETUP) .venv $(TEST_LOCKS)

demo: setup ## install, pull the default model and stream an answer (PROMPT="..." for your own question)
	@.venv/bin/jaxpaged generate --chat --temperature 0.2 --top-p 0.9 --seed 0 -- "$${PROMPT:-What is the capital of France? Answer in one sentence.}"

test: lint ## everything that has to pass: lint, then all tests, under 12 minutes on 2 cores
	$(PYTEST) $(IN_PARALLEL)

test-fast: setup-dev ## the tests that need neither jax nor a model, under 2 minutes
	$(PYTEST) $(IN_PARALLEL) --fast

lint: setup-dev ## ruff, ruff format, mypy, and a syntax check of the scripts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	@for script in scripts/*.sh .ci/run; do bash -n "$$script" || exit; done

test-kernels: setup-dev ## the large kernel tests: more cases, the GPU interpreter, kernels compiled for GPUs that are not there
	$(PYTEST) -n $(JOBS) --dist load --tier kernels
	@$(MAKE) --no-print-directory compile-gpu

compile-gpu: ## the GPU kernels and a whole step compiled for H200, H100 and Ampere cards, with no GPU, against their budgets; one kernel an op with CUDA 12
	@$(SETUP) .venv-compile-gpu compile-gpu
	.venv-compile-gpu/bin/python scripts/compile_kernels.py
	.venv-compile-gpu/bin/python scripts/compile_sm80.py
	.venv-compile-gpu/bin/python scripts/compile_step.py
	@$(SETUP) .venv-compile-gpu12 compile-gpu12
	.venv-compile-gpu12/bin/python scripts/compile_kernels.py

test-system: setup-dev ## the tests that start whole processes (needs Debian's prometheus and chromium; screenshots go to build/artefacts)
	$(PYTEST) --tier system

test-min-jax: ## contract, interpreter and batch = alone on the oldest jax we support, in .venv-min-jax
	@$(SETUP) .venv-min-jax min-jax
	.venv-min-jax/bin/python -m pytest $(IN_PARALLEL) --tier min-jax

test-long: setup-dev ## the long versions of one area: AREA=pages|sampling|server|kernels|models|diagnose
	$(PYTEST) --tier long --area $(or $(AREA),$(error AREA is one of pages sampling server kernels models diagnose))

lock: ## requirements/*.lock from pyproject.toml (UPGRADE=1: newest versions)
	@bash scripts/make_locks.sh $(if $(UPGRADE),--upgrade)

wheel: setup-dev ## dist/jaxpaged-*.whl
	.venv/bin/python -m hatchling build -t wheel

gpu-bundle: setup-dev ## dist/gpu-bundle: what scripts/gpu_check.py needs on a machine with a GPU where nothing can be installed
	.venv/bin/python scripts/make_gpu_bundle.py

clean: ## remove environments, caches and builds; pulled models stay
	rm -rf .venv .venv-min-jax .venv-compile-gpu .venv-compile-gpu12 dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
