# `make` lists the targets and the variables.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help

VENV     ?= .venv
PY       ?= $(VENV)/bin/python
PYTHON   ?=
DEVICE   ?= auto
PROFILE  ?= quick
CHAPTERS ?=
JOBS     ?= 1
FORCE    ?=
WORKERS  ?= 2
HOST     ?= 127.0.0.1
PORT     ?= 8000
UPGRADE  ?=

# With PY=... the caller brings an environment (conda, a GPU host) and nothing is installed.
READY := $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.ready)
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
# Test workers share the cores: one thread each, or they fight over them.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 JUPYTER_PLATFORM_DIRS=1

# Cell by cell; --dist loadscope keeps the cells of a notebook together.
NBVAL = $(ONE_THREAD) $(PY) -m pytest -q --nbval-lax --nbval-current-env -n $(WORKERS) --dist loadscope

.PHONY: help setup reproduce test book serve wheel smoke lab check bench engines soak lock clean

help: ## list the targets and the variables
	@echo "Two commands do most of it:  make reproduce   and   make test"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "Variables, with their defaults:"
	@echo "  DEVICE=auto        device of 'reproduce': auto, cpu or cuda"
	@echo "  PROFILE=quick      profile of 'reproduce': quick (CPU, minutes) or full (what verdicts rest on)"
	@echo "  CHAPTERS=          chapters of 'reproduce', e.g. CHAPTERS=\"rotation-and-codebook training-tensors\"; empty: all"
	@echo "  JOBS=1             chapters of 'reproduce' that run at the same time"
	@echo "  FORCE=             FORCE=1: 'reproduce' also re-runs chapters that are up to date"
	@echo "  MINUTES=           'reproduce' stops after so many minutes, and goes on where it was when called again"
	@echo "  WORKERS=2          processes of 'test' and 'soak'"
	@echo "  PORT=8000          port of 'serve'; HOST=127.0.0.1 is its address"
	@echo "  PYTHON=            interpreter for 'setup', e.g. PYTHON=python3.12; empty: the newest that is found"
	@echo "  VENV=.venv         where 'setup' installs"
	@echo "  PY=                an interpreter that already has everything, e.g. PY=python in a conda environment"
	@echo "  PYTHONS=, TORCHES= versions that 'smoke' takes, e.g. PYTHONS=3.12 TORCHES=\"2.11 2.13\"; empty: all"
	@echo "  UPGRADE=           UPGRADE=1: 'lock' takes the newest versions instead of keeping today's pins"

setup: $(READY) ## create .venv with the pinned packages (all other targets do it when needed)
	@echo "$(PY) is ready."

$(VENV)/.ready: requirements.lock pyproject.toml
	@VENV="$(VENV)" PYTHON="$(PYTHON)" .ci/setup
	@touch $@

reproduce: $(READY) ## re-execute the chapters, rebuild figures, tables and HTML, report what moved
	@$(PY) -m tq.kernels
	@$(PY) -m tq.book reproduce $(CHAPTERS) --device $(DEVICE) --profile $(PROFILE) --jobs $(JOBS) $(if $(FORCE),--force) $(if $(MINUTES),--minutes $(MINUTES)) --book

test: check ## check, then every test, then the notebooks that changed, and three more, cell by cell (nbval)
	@.ci/browser
	@$(PY) -m tq.kernels
	@rm -f _build/failed-*.txt; status=0; \
	$(ONE_THREAD) $(PY) -m pytest tests -q -n $(WORKERS) --dist loadgroup -m "not soak" --durations=40 || status=$$?; \
	if [ -n "$(NOTEBOOKS)" ]; then \
	  notebooks=$$($(PY) .ci/notebooks.py) && $(NBVAL) $$notebooks --durations=40 || status=$$?; \
	fi; \
	test $$status = 0 || cat _build/failed-*.txt >&2 || true; \
	exit $$status

book: $(READY) ## build the HTML from the committed notebooks, without executing them
	@$(PY) -m tq.book build

serve: $(READY) ## serve the HTML that was built last, on this machine only unless HOST says otherwise
	@folder=$$(ls -td _build/html _build/fresh/html 2>/dev/null | head -n 1 || true); \
	test -n "$$folder" || { echo "There is no built book yet: run 'make book' or 'make reproduce' first." >&2; exit 1; }; \
	echo "$$folder on http://$(HOST):$(PORT)/ (Ctrl-C stops)"; \
	$(PY) -m http.server --bind $(HOST) --directory "$$folder" $(PORT)

wheel: $(READY) ## build the wheel of the package into dist/
	@$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist . && ls dist/*.whl

smoke: ## install the wheel on every supported Python and PyTorch and open every public door (half an hour)
	@.ci/wheel

lab: $(READY) ## open the chapters in JupyterLab
	@$(PY) -m jupyter lab notebooks

check: $(READY) ## ruff, mypy and the floors of the house
	@$(PY) -m ruff check --quiet .
	@$(PY) -m mypy --no-error-summary
	@$(PY) -m pytest -q tests/test_layering.py

bench: $(READY) ## time the codec against a copy, the reference and peers; print and record the table
	@$(PY) -m tq.book bench

engines: $(READY) ## fetch other people's engines of inference, which the book's is measured beside, and its pretrained model
	@$(PY) -m tq.lab.engines install
	@$(PY) -m tq.infer fetch

soak: $(READY) ## the long repetitions that 'test' leaves out, every notebook cell by cell, all tests with the clock ahead
	@status=0; \
	$(ONE_THREAD) $(PY) -m pytest tests -n $(WORKERS) -m soak || status=$$?; \
	$(NBVAL) notebooks || status=$$?; \
	$(ONE_THREAD) PY="$(PY)" WORKERS="$(WORKERS)" .ci/clock || status=$$?; \
	exit $$status

lock: $(READY) ## resolve requirements.lock and environment.yml anew from pyproject.toml
	@$(PY) .ci/lock.py $(if $(UPGRADE),--upgrade)

clean: ## remove everything that was built (not .venv, not the committed results)
	@rm -rf _build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
