# The commands a person and CI share. `make train` and `make test` set everything up by themselves, inside .venv.
#
#   make train                      the main job: a graph transformer on two DeepSpeed ranks
#   make train RANKS=4 ARGS="plan.mode=model"
#   make test                       the tests;  make check: lint and tests, what CI runs
#
# pip's own settings apply. Without a GPU, PIP_EXTRA_INDEX_URL=<the CPU index that pytorch.org names> spares the
# download of the CUDA libraries: pip then prefers the +cpu build of the same version.

PYTHON ?= python3
RANKS  ?= 2
CONFIG ?= configs/digits_gt.yaml
ARGS   ?=
# Options of the deepspeed launcher itself, such as --master_port 29501 when two jobs share a machine.
LAUNCH ?= --log_level warning
# Options of pytest, such as TESTS="-k exchange -x".
TESTS  ?=

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.gtx-installed
# DeepSpeed looks for ninja on the PATH when it compiles an op.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup train test lint check clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#  \{1,\}\(make .*\)/  \1/p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "gtx needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) -V); run make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) -V)"; \
	    $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "installing torch, the largest of the downloads"
	$(BIN)/python -m pip install --quiet "torch==2.13.0" -c constraints.txt
	@echo "installing gtx and the rest"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

train: setup
	deepspeed --num_gpus $(RANKS) $(LAUNCH) launch.py train $(CONFIG) $(ARGS)

test: setup
	python -m pytest $(TESTS)

lint: setup
	ruff check .
	ruff format --check .
	mypy

check: lint test

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
