# `make reproduce` and `make test` work in a fresh clone, given Python 3.11 to 3.13 and make.
#
#   PYTHON=python3.12   interpreter of the environment (default: python3)
#   TORCH=cu130         torch for CUDA 13 instead of the CPU (default: cpu)
#   PROFILE=smoke       another profile of workflow/config (default: cpu)
#   CORES=2             cores for Snakemake (default: all)
#   WORKERS=8           processes that run tests (default: 2)

PYTHON  ?= python3
TORCH   ?= cpu
PROFILE ?= cpu
CORES   ?= all
WORKERS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help reproduce test test-crash test-crash-pipeline test-container test-cluster lint smoke env env-test env-slurm \
	lock clean-work

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
INDEX  := https://download.pytorch.org/whl/$(TORCH)
# Stamps carry the content of the pins in their name, so that a second call installs nothing.
key     = $(shell cat $(1) | cksum | cut -d' ' -f1)
BASE   := $(VENV)/.installed-$(TORCH)-$(call key,requirements/base.lock.txt requirements/torch.txt)
TEST   := $(VENV)/.tests-$(call key,requirements/test.lock.txt)
TF4    := $(VENV)/.tf4-$(call key,requirements/tf4.lock.txt)
SLURM  := $(VENV)/.slurm-$(call key,requirements/slurm.lock.txt)

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -7

reproduce: $(BASE)  ## the profile's tables, then published against reproduced
	$(BIN)/snakemake --cores $(CORES) --config profile=$(PROFILE)
	@cat results/$(PROFILE)/tables.md
	$(if $(filter cpu,$(PROFILE)),$(BIN)/sparkgpt reproduced --results results --reproduced results/cpu)

smoke:  ## the whole pipeline in two minutes
	$(MAKE) reproduce PROFILE=smoke

test: $(TEST) $(TF4)
	SPARKGPT_TF4_PYTHON=$(CURDIR)/$(VENV)/tf4/bin/python $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -rs

test-container: $(TEST)  ## the smoke profile in an image built here
	CORES=$(CORES) tests/container/run

test-crash: $(BASE)  ## kills runs at random and compares their ends; KILLS=1000 for more, SEED=S for others
	$(BIN)/python tests/crash/run.py --kills $(or $(KILLS),24) $(if $(SEED),--seed $(SEED))

test-crash-pipeline: $(BASE)  ## kills Snakemake and its jobs at random; KILLS and SEED likewise
	$(BIN)/python tests/crash/pipeline.py --kills $(or $(KILLS),10) $(if $(SEED),--seed $(SEED))

test-cluster: $(TEST) $(SLURM)  ## the smoke pipeline on a SLURM cluster of two nodes, started here
	$(BIN)/python tests/cluster/slurm.py
	$(BIN)/python -m pytest -x tests/cluster/on_slurm.py

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

env: $(BASE)

env-test: $(TEST) $(TF4)

env-slurm: $(SLURM)  ## what `--profile profiles/slurm` needs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "sparkgpt: error: $(PYTHON) is not Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch comes last and from its own index; everything it needs is then there already, so that an
# index that can't be reached costs a second. An older torch goes first: its other builds have the
# same version, and pip would keep the one that is there.
$(BASE): | $(BIN)/python
	@echo "installing into $(VENV): a few minutes the first time, nothing later"
	$(PIP) install --requirement requirements/base.lock.txt
	@if ls $(VENV)/.installed-* >/dev/null 2>&1; then $(PIP) uninstall --yes torch; rm $(VENV)/.installed-*; fi
	$(PIP) --retries 1 --timeout 15 install --extra-index-url $(INDEX) --requirement requirements/torch.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

$(TEST): $(BASE)
	$(PIP) install --requirement requirements/test.lock.txt
	touch $@

$(SLURM): $(BASE)
	$(PIP) install --requirement requirements/slurm.lock.txt
	touch $@

# An environment that sees this one's packages, torch among them, behind its own older ones.
$(TF4): $(TEST)
	$(BIN)/python -m venv --without-pip --clear $(VENV)/tf4
	echo $(CURDIR)/$$(echo $(VENV)/lib/python3.*/site-packages) > $$(echo $(VENV)/tf4/lib/python3.*/site-packages)/base.pth
	$(PIP) --python $(VENV)/tf4/bin/python install --no-deps --requirement requirements/tf4.lock.txt
	touch $@

lock:  ## new pins, from requirements/*.in
	$(BIN)/python -m pip install --quiet uv
	cd requirements && for name in base test slurm tf4; do \
	  if [[ $$name == test || $$name == slurm ]]; then cp base.lock.txt $$name.lock.txt; fi; \
	  UV_CUSTOM_COMPILE_COMMAND="make lock" ../$(BIN)/uv pip compile --quiet --universal \
	    --python-version 3.11 --generate-hashes --no-annotate $$name.in --output-file $$name.lock.txt; \
	done

clean-work:  ## checkpoints of all profiles; records stay
	rm -rf results/*/work
