# Every target sets up its own environment from the pinned constraints: `make demo` on a fresh clone just works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-torch
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# trackio and what a local run of it imports; --no-deps, because it asks for an older pillow than the pinned one
TRACKIO := trackio gradio-client httpx httpcore orjson python-multipart starlette uvicorn brotli
# What triton's interpreter runs on a CPU; --no-deps, because it must not replace torch's CPU build. Its version is not a
# constraint, because the CUDA build of torch requires another one.
INTERPRETED := triton==3.9.0 liger-kernel cut-cross-entropy
# Tests run two processes on two cores; each keeps to one thread, or they would fight for them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-slow check docs bench format gpu clean setup

# The demo needs a part of the packages; the other targets add the rest to the same environment.
# Python must write bytecode here, because tools/set_up.py compiles none for the demo.
demo: export PYTHONDONTWRITEBYTECODE =
demo: $(DEMO_STAMP)
	@echo "Training tied, untied and factored models, three seeds each." >&2
	@$(BIN)/tiewise compare --out runs/demo --overwrite
	@echo "Report: runs/demo/report.html. Next, your own text: $(BIN)/tiewise compare --text FILE" >&2

# Python writes bytecode here: otherwise each process compiles the package and the tests again.
test test-slow: export PYTHONDONTWRITEBYTECODE =

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
	$(BIN)/python tools/make_claims.py --hold
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

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) tools/set_up.py $(VENV) dev
	-@$(BIN)/python -m pip install -q -c constraints.txt 'mlx-lm[cpu]'  # without a wheel, the tests that run it skip
	-@$(BIN)/python -m pip install -q -c constraints.txt --no-deps $(TRACKIO)  # without it, its tests skip
	@# In a separate folder, because torch imports triton wherever it finds it.
	-@$(BIN)/python -m pip install -q -c constraints.txt --no-deps --upgrade --target $(VENV)/interpreted $(INTERPRETED)
	@touch $(DEMO_STAMP) $@

$(DEMO_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) tools/set_up.py $(VENV) torch --then 180
	@touch $@

# On a machine with a GPU: PYTHON is one with torch, triton and transformers, which nothing installs. OUT gets the results.
# Optional wheels: benchmarks/gpu_wheels.txt.
OUT ?= runs/gpu
gpu:
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu --out $(OUT)

clean:
	rm -rf $(VENV) runs build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
