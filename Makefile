# `make demo` trains a small model on real text; `make test` runs the checks that need no GPU, but for those that repeat
# others on another GPU's blocks or on the newest jax: `make test-all` runs these too.
# Each makes its own .venv first. PYTHON names another Python (3.12 or newer).

PYTHON ?= python3
# The version that the GPU images ship; the kernels are compiled and tested with it.
JAX ?= 0.11.2
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Python compiles the modules that it imports, and keeps the result. pip would compile all modules when it installs them:
# PIP_NO_COMPILE=0 forbids it, since pip takes this variable for the value of its option `compile`.
export PIP_NO_COMPILE = 0
unexport PYTHONDONTWRITEBYTECODE
ifeq ($(GPU),)
export JAX_PLATFORMS ?= cpu
CUDA :=
else
CUDA := ,cuda
endif

.PHONY: demo docs static test test-all test-unit test-stress test-gpu test-sanitizer test-without-triton report lint newest oldest release clean

demo: .venv/.demo
	$(BIN)/jax-kernels demo $(ARGS)

# tests/support/processes/room.py clears compiled programs before a process runs out of memory or of memory maps, whichever
# tests a worker happens to get. All tests run in three parts, so that no process grows large.
PYTEST := $(BIN)/python -m pytest -n 2 --dist=worksteal
HOUSE := tests/test_house.py
FIRST := tests/benchmarks tests/bridge tests/cli
SECOND := tests/masks tests/models tests/ops
THIRD := tests $(foreach path,$(FIRST) $(SECOND) $(HOUSE),--ignore=$(path))

WITHOUT_TRITON := tests/bridge tests/cli tests/ops tests/masks tests/models tests/pallas

test: .venv/.dev
	$(MAKE) --jobs=2 --output-sync static docs
	$(PYTEST) -m "not slow" $(ARGS) tests

test-all: .venv/.dev
	$(MAKE) --jobs=2 --output-sync lint docs
	$(PYTEST) $(ARGS) $(FIRST)
	$(PYTEST) $(ARGS) $(SECOND)
	$(PYTEST) $(ARGS) $(THIRD)
	$(MAKE) newest oldest

# One case of each op, in less than a minute.
test-unit: .venv/.dev
	$(PYTEST) -q -m unit $(ARGS) tests/test_one_case.py

# Random calls of all ops against float64. ARGS="--minutes 60 --output FILE" runs an hour; on a GPU, with its kernels.
test-stress: .venv/.dev
	PYTHONPATH=. $(BIN)/python tests/tools/stress.py $(if $(GPU),,--workers 2) $(ARGS)

test-gpu: .venv/.dev
	XLA_FLAGS="$$XLA_FLAGS --xla_gpu_autotune_level=0" $(BIN)/python -m pytest -m "gpu and not alone" -n 12 --dist=loadgroup $(ARGS)
	XLA_FLAGS="$$XLA_FLAGS --xla_gpu_autotune_level=0" $(BIN)/python -m pytest -m "gpu and alone" $(ARGS)

# compute-sanitizer's tools over one small call of every kernel, on a Hopper GPU.
test-sanitizer: .venv/.dev
	PYTHONPATH=. $(BIN)/python tests/tools/sanitizer.py $(ARGS)

# The tests where Pallas-Triton cannot be imported, as with a later JAX. Tests of Triton kernels are skipped.
test-without-triton: .venv/.dev
	JAX_KERNELS_TESTS_WITHOUT_TRITON=1 $(PYTEST) -m "not slow" $(ARGS) $(WITHOUT_TRITON)

lint: static
	$(BIN)/python -m pytest -q $(HOUSE)

static: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in site/. A dead link, a missing name or a page outside of the navigation fails.
docs: .venv/.dev
	PYTHONPATH=. JAX_PLATFORMS=cpu NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The README's table and picture, from the results in benchmarks/results/.
report: .venv/.dev
	PYTHONPATH=. $(BIN)/python benchmarks/readme_table.py
	PYTHONPATH=. $(BIN)/python benchmarks/picture.py

# The sdist and the wheel of HEAD, in dist/, built reproducibly and checked in a fresh environment. Nothing is uploaded.
release: .venv/.dev
	PYTHONPATH=. $(BIN)/python tests/tools/release.py $(ARGS)

# Import and numerics on the newest jax, and the lowering of every kernel for a Hopper GPU, in an environment of its own.
newest: .venv-newest/.ready
	.venv-newest/bin/python -m pytest -n 2 --dist=worksteal tests/test_import.py tests/ops/attention/test_flash_attention*.py tests/ops/attention/test_transforms.py tests/ops/attention/test_errors.py tests/ops/attention/test_decode_attention.py tests/ops/attention/test_score_mod.py -m "not gpu and not compile"
	.venv-newest/bin/python -m pytest tests/pallas/test_sanitizer_calls.py -k reach

# The bridge on the oldest PyTorch that pyproject.toml allows, in an environment of its own: torch.compile differs most.
oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -m pytest -n 2 --dist=worksteal tests/bridge/operators tests/bridge/translate tests/bridge/jax_functions tests/bridge/ops/drop_in tests/bridge/ops/attention tests/bridge/test_derivatives.py -m "not gpu and not slow"

.venv/.python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 12) else "Python 3.12 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/.demo: .venv/.python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[flax,torch,cli$(CUDA)]' 'jax==$(JAX)'
	touch $@

.venv/.dev: .venv/.python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[dev$(CUDA)]' 'jax==$(JAX)' 'jax-cuda13-plugin==$(JAX)' 'jax-cuda13-pjrt==$(JAX)'
	touch .venv/.demo $@

.venv-newest/.ready: .venv/.python pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -q -e . jax-cuda13-plugin jax-cuda13-pjrt 'pytest>=8.4' 'pytest-xdist>=3.7' 'pytest-timeout>=2.4' 'hypothesis>=6.130'
	touch $@

.venv-oldest/.ready: .venv/.python pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -q -e '.[flax,torch,cli]' 'jax==$(JAX)' 'torch==2.11.*' 'pytest>=8.4' 'pytest-xdist>=3.7' 'pytest-timeout>=2.4' 'hypothesis>=6.130'
	touch $@

clean:
	rm -rf .venv .venv-newest .venv-oldest build dist site *.egg-info
