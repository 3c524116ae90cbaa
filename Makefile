# make demo   the main job: MiniMax-M3 served over a paged cache, tokens equal to transformers'
# make test   the whole suite (GPU tests run where there is a GPU)
# Both set up everything they need in .venv first. Others: lint, format, build, proto, gpu-check, clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A waiting OpenMP thread sleeps instead of spinning: on a machine of few or busy cores, spinning makes
# every small tensor operation wait for a time slice.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test setup build lint format proto gpu-check clean

demo: build
	$(BIN)/python -m examples.m3_serving.demo

# With the test-only binding of host-side C++.
test: setup
	MSA_BUILD_TEST_INTERNALS=1 $(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m pytest $(PYTEST_ARGS)

setup: $(VENV)/.ready

# A dependency group, not an extra: nothing of ours has to be built to install it.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group dev
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

# Incremental: compiles what changed since the last build.
build: setup
	$(BIN)/python setup.py --quiet build_ext --inplace

CXX_FILES := csrc tests/cpp tests/emulation -regextype egrep -regex '.*\.(h|cpp|cu|cuh|inc)'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find $(CXX_FILES) | xargs -d '\n' $(BIN)/clang-format --dry-run --Werror

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find $(CXX_FILES) | xargs -d '\n' $(BIN)/clang-format -i

# After a change of the messages between gateway and worker.
PROTO := m3_serving/gateway/wire/worker.proto
proto: setup
	$(BIN)/python -m grpc_tools.protoc -I examples --python_out=examples --pyi_out=examples $(PROTO)

# On a machine with a GPU: the GPU tests, then a short benchmark; log and results in OUT.
# MSA_PYTHON: the Python that has a CUDA build of torch; the libraries must be built.
MSA_PYTHON ?= $(BIN)/python
OUT ?= build/gpu-check
gpu-check:
	PYTHONPATH=. $(MSA_PYTHON) -m bench.gpu_check --out $(OUT)

clean:
	rm -rf build dist .venv *.egg-info msa_kernels/lib tests/_internals*.so
