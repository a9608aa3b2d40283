# One command for each job; each works from a bare checkout, and repeats cost nothing.

PYTHON ?= python3
GRAPH ?= graph/disagg.py
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install model serve test check bench soak clean

help:  ## Show these lines.
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 17

install: model  ## Make .venv with everything that serving and testing need, and fetch the default model.
	@echo "The command graph is in $(BIN); put it on the PATH with: . $(BIN)/activate"

$(BIN)/python:
	@$(PYTHON) -c 'import sys, ensurepip; assert sys.version_info >= (3, 11)' \
		|| { echo "Python 3.11 or newer with its venv module is needed; name it with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q graph components frontends  # quick starts where bytecode is not written
	@touch $@

model: $(INSTALLED)  ## Fetch the default model and convert it, once, into the cache.
	@$(BIN)/python -m components.model_cache

serve: model  ## Serve GRAPH (graph/disagg.py) on port 8000; ARGS="--port 9000" and the like are passed on.
	$(BIN)/graph serve $(GRAPH) $(ARGS)

test: model  ## Run the tests.
	$(BIN)/python -m pytest $(ARGS)

check: $(INSTALLED)  ## Lint, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: model  ## Measure this machine: engine and peers, serving, start-up, routing; ARGS=--quick for less of it.
	$(BIN)/python tests/bench/bench_engine_cpu.py $(ARGS)
	$(BIN)/python tests/bench/bench_bookkeeping.py
	$(BIN)/python tests/bench/bench_serve.py $(ARGS)
	$(BIN)/python tests/bench/bench_start.py $(ARGS)
	$(BIN)/python tests/bench/bench_router.py --blocks 200000 --decisions 5000 --seconds 1
	$(BIN)/python tests/bench/bench_sim.py --kind conversations --requests 300
	$(BIN)/python tests/bench/bench_routing.py --quick

soak: model  ## Run the full matrices and write tests/results/soak.md; takes about two hours.
	-$(BIN)/python -m pytest -m soak --junitxml=build/soak.xml $(ARGS)
	$(BIN)/python tests/soak_report.py tests/results/soak.md build/soak.xml

clean:  ## Remove the environment and what tools left behind; the model cache stays.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
