# make demo, make test: nothing but python3 (3.11 or newer), git and make is needed beforehand.
# Variables: PYTHON (interpreter to build the environment with), VENV, CONSTRAINTS, EXTRAS, JOBS (test processes),
# ARGS (more arguments for pytest, e.g. ARGS="-k sink -x"), EXCEPT (markers of tests to leave out, e.g. EXCEPT=once).
VENV ?= .venv
CONSTRAINTS ?= constraints/all.txt
EXTRAS ?= torch,jax,models,test
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); if [ $$n -gt 8 ]; then n=8; fi; echo $$n)
ARGS ?=
EXCEPT ?=
BUT := $(foreach marker,$(EXCEPT), and not $(marker))
BIN := $(VENV)/bin
PATHS := .
MAKEFLAGS += --no-print-directory
export PYTHON

.NOTPARALLEL:
.PHONY: help venv demo test test-compile test-gpu test-interpret lint format format-check typecheck clean

help:
	@echo "make demo        one decode step of DeepSeek-V3, V3.2 and MODEL1 in both frameworks, checked against fp64"
	@echo "make test        every test tier that this machine can run"
	@echo "make test-compile test-gpu test-interpret    one tier"
	@echo "make lint format format-check typecheck"
	@echo "make clean       removes $(VENV) and caches"

venv:
	@sh tools/make_venv.sh $(VENV) $(CONSTRAINTS) $(EXTRAS)

demo: venv
	$(BIN)/python examples/demo.py

# The interpreter tier comes last: it is the one that runs everywhere.
test: test-compile test-gpu test-interpret

test-compile: venv
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n $(JOBS) -m "compile and not gpu$(BUT)" $(ARGS)

test-gpu: venv
	@if nvidia-smi -L >/dev/null 2>&1; then \
	    set -x; TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu $(ARGS); \
	else \
	    echo "no NVIDIA GPU here: the gpu tier was not run"; \
	fi

test-interpret: venv
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) -m "not compile and not gpu$(BUT)" $(ARGS)

lint: venv
	$(BIN)/ruff check $(PATHS)

format: venv
	$(BIN)/ruff check --fix --exit-zero --quiet $(PATHS)
	$(BIN)/ruff format $(PATHS)

format-check: venv
	$(BIN)/ruff format --check $(PATHS)

typecheck: venv
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build
