# Every target sets up its own environment from the pinned constraints: `make demo` on a fresh clone just works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests run two processes on two cores; each keeps to one thread, or they would fight for them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-slow check docs bench format clean setup

demo: $(STAMP)
	$(BIN)/tiewise compare --out runs/demo --overwrite

test: $(STAMP)
	$(PYTEST)

test-slow: $(STAMP)
	$(PYTEST) -m slow

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks tools examples docs
	$(BIN)/ruff check src tests benchmarks tools examples docs
	$(BIN)/mypy
	$(BIN)/python tools/make_reference.py --hold
	$(BIN)/python tools/make_schemas.py --hold
	$(BIN)/python tools/make_stubs.py --hold
	$(BIN)/python tools/code_density.py --check
	$(BIN)/python tools/check_commits.py

docs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_docs.py
	$(BIN)/zensical build --strict

bench: $(STAMP)
	$(BIN)/python -m benchmarks.loss
	$(BIN)/python -m benchmarks.run

format: $(STAMP)
	$(BIN)/ruff format src tests benchmarks tools examples docs
	$(BIN)/ruff check --fix src tests benchmarks tools examples docs

setup: $(STAMP)

# torch first and by its exact pin: an unpinned torch pulls several gigabytes of CUDA packages
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	-$(BIN)/python -m pip install -q -c constraints.txt 'mlx-lm[cpu]'  # where it has no wheel, the tests that run it skip
	-$(BIN)/tiewise kernels build  # without a compiler or AVX-512 the portable path computes the same
	touch $@

clean:
	rm -rf $(VENV) runs build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
