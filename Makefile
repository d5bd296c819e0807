# Each target makes its own environment on first use: .venv, again when what goes into it changes.
#   make test ARGS="-k demo"        more arguments for pytest, the demo or the benchmarks
#   make test VENV=path/to/venv     an environment you have: used as it is, nothing is installed
#   make test PYTHON=python3.10     the Python that .venv is made with

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY := $(VENV)/bin/python

ifeq ($(origin VENV),file)
ENVIRONMENT := $(VENV)/.installed
else
ENVIRONMENT :=
endif

.DEFAULT_GOAL := help
.PHONY: help demo test chaos engines check bench clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s  %s\n", $$1, $$2 }' Makefile

demo: $(ENVIRONMENT) ## train, save, load and compare on this machine (AB=1: what a save costs in three ways)
ifdef AB
	PYTHONPATH=examples $(PY) -m engine.ab $(ARGS)
else
	$(PY) -m planner demo $(ARGS)
endif

test: $(ENVIRONMENT) ## run the tests
	$(PY) -m pytest -n 4 $(ARGS)

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

clean: ## remove the environment and everything generated
	rm -rf .venv .venv-engines .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
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
