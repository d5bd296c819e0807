# Each target makes its own environment on first use: .venv, again when what goes into it changes.
#   make test ARGS="-k demo"        more arguments for pytest, the demo or the benchmarks
#   make test VENV=path/to/venv     an environment you have: used as it is, nothing is installed
#   make test PYTHON=python3.10     the Python that .venv is made with
#   make demo NPU=1                 on torch_npu, like `make npu`, which needs a C++ compiler

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY := $(VENV)/bin/python

ifeq ($(origin VENV),file)
ENVIRONMENT := $(VENV)/.installed
NPU_VENV := .venv-npu
NPU_ENVIRONMENT := $(NPU_VENV)/.installed
else
ENVIRONMENT :=
NPU_VENV := $(VENV)
NPU_ENVIRONMENT :=
endif

# torch_npu finds its CANN libraries there; see tests/npu/fakecann/fakecann.h.
ON_FAKE_CANN := LD_LIBRARY_PATH=$(CURDIR)/tests/npu/fakecann/build$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}

.DEFAULT_GOAL := help
.PHONY: help demo test npu npu-2.10 fakecann chaos engines check bench clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "make %-8s  %s\n", $$1, $$2 }' Makefile

ifneq ($(NPU),)
demo: $(NPU_ENVIRONMENT) fakecann
	@$(ON_FAKE_CANN) TORCH_CPP_LOG_LEVEL=ERROR $(NPU_VENV)/bin/python -m tests.npu.demo $(ARGS)
else ifneq ($(AB),)
demo: $(ENVIRONMENT)
	PYTHONPATH=examples $(PY) -m engine.ab $(ARGS)
else
demo: $(ENVIRONMENT) ## train, save, load and compare on this machine (AB=1: three ways to save; NPU=1: on a fake NPU)
	$(PY) -m planner demo $(ARGS)
endif

test: $(ENVIRONMENT) ## run the tests
	$(PY) -m pytest -n 6 --dist worksteal $(ARGS)

npu: $(NPU_ENVIRONMENT) fakecann ## run the tests on torch_npu 2.13.0, on a stand-in for CANN
	$(ON_FAKE_CANN) $(NPU_VENV)/bin/python -m pytest -n 2 tests/npu $(ARGS)

npu-2.10: .venv-npu-2.10/.installed fakecann ## the same on torch 2.10.0 and torch_npu 2.10.0.post2 (7 GB)
	$(ON_FAKE_CANN) .venv-npu-2.10/bin/python -m pytest -n 2 tests/npu $(ARGS)

fakecann:
	@$(MAKE) --no-print-directory -C tests/npu/fakecann

chaos: $(ENVIRONMENT) ## 200 saves with random faults (ARGS="--rounds 50 --seed 1")
	$(PY) -m tests.chaos $(ARGS)

ENGINES := accelerate lightning torchtitan
engines: $(ENGINES:%=engine-%) ## save and load with real engines, each in an environment of its own

engine-%: .venv-engines/%/.installed
	.venv-engines/$*/bin/python -m pytest tests/engines/test_$*.py $(ARGS)

check: $(ENVIRONMENT) ## formatting, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(ENVIRONMENT) ## run the benchmarks in their short form
	$(PY) benchmarks/run.py --short $(ARGS)

clean: ## remove the environments and everything generated
	rm -rf .venv .venv-npu .venv-npu-2.10 .venv-engines tests/npu/fakecann/build .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find planner tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

.PRECIOUS: .venv-engines/%/.installed
.venv-engines/%/.installed: tests/engines/%.txt pyproject.toml
	$(PYTHON) -m venv .venv-engines/$*
	.venv-engines/$*/bin/python -m pip install --quiet -r $< -e .
	touch $@

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

.venv-npu/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-npu
	.venv-npu/bin/python -m pip install --quiet -c constraints.txt -e ".[dev,npu]"
	touch $@

.venv-npu-2.10/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-npu-2.10
	grep -v '^torch' constraints.txt > .venv-npu-2.10/constraints.txt
	.venv-npu-2.10/bin/python -m pip install --quiet -c .venv-npu-2.10/constraints.txt torch==2.10.0 -e ".[dev]"
	.venv-npu-2.10/bin/python -m pip install --quiet -c .venv-npu-2.10/constraints.txt pyyaml
	# It asks for torch 2.10.0+cpu by that name; the build for CUDA does too.
	.venv-npu-2.10/bin/python -m pip install --quiet --no-deps torch_npu==2.10.0.post2
	touch $@
