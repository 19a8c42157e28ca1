# Two commands do everything, set-up included:  make quickstart   make test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := megatron_distill launch tools benchmarks tests
TEST_PROCESSES ?= 2
SLOW_PROCESSES ?= 3
# Each of them computes with one thread: together they are as many as the cores. The long tests, which
# wait for a third of their time, have one more. In the order of collection whole runs come before
# unit tests, which are short enough for an even end. Compiled modules are kept, also where the
# environment forbids it: each rank would compile them anew.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests \
	--numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help venv peers quickstart quickstart-offline quickstart-tokenizers test slow lint format docs pins clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   distil a small model on this machine and show the result"
	@echo "make quickstart-offline   the same, and once more from a store without the teacher"
	@echo "make quickstart-tokenizers   a teacher and students of another tokenizer, one per loss"
	@echo "make test         all tests that fit two cores and six minutes"
	@echo "make slow         the long tests"
	@echo "make peers        install TRL, Liger, ModelOpt and lm-eval, which some tests compare with"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff rewrite the sources"
	@echo "make docs         write docs/configuration.md anew from the schema"
	@echo "make pins         write constraints.txt anew from what .venv holds"
	@echo "make clean        remove .venv and every cache"
	@echo "PYTHON=python3.12 make ...   choose the interpreter of .venv (3.11 or 3.12)"

venv: $(STAMP)

# torch goes first and alone: its pin then takes the CPU build where one is offered, and what is
# installed after it keeps that build. Runs again when the pins change.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || { \
		echo "megatron-distill needs Python 3.11 or 3.12, and $(PYTHON) is" \
			"$$($(PYTHON) --version 2>&1); choose one with: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'torch==2.13.*'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Packages that some tests compare with and skip where they are missing.
peers: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'

quickstart: $(STAMP)
	$(BIN)/python launch/quickstart.py

quickstart-offline: $(STAMP)
	$(BIN)/python launch/quickstart.py --offline

quickstart-tokenizers: $(STAMP)
	$(BIN)/python launch/quickstart_tokenizers.py

test: $(STAMP)
	$(PYTEST)

# Status 5 of pytest says that no test is marked slow, which is no failure.
slow: TEST_PROCESSES = $(SLOW_PROCESSES)
slow: $(STAMP)
	$(PYTEST) -m 'slow and not gpu' || [ $$? -eq 5 ]

lint: $(STAMP)
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/mypy $(wildcard megatron_distill launch tools benchmarks)

format: $(STAMP)
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

docs: $(STAMP)
	$(BIN)/python -m megatron_distill.config.reference docs/configuration.md

pins: $(STAMP)
	@{ echo "# Versions that the tests pass with. Written by \`make pins\`; the CUDA packages that torch"; \
	   echo "# brings along on a machine with a GPU are left to torch."; \
	   $(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' \
	       | grep -vE '^(nvidia|cuda|triton)|@ '; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
