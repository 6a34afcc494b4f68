# make demo   sets up .venv (MPI runtime included) and trains a ResNet with DASO on two processes
# make demo-lm  trains a small language model with Streaming DiLoCo on two processes
# make test-fast  runs the tests that need one process
# make test   runs the tests; see tests/README.md
# make test-accelerators  compiles training steps for an H100 and a TPU, which need not be there
# make test-oldest  runs the tests with the oldest versions that pyproject.toml allows
# make lint   checks style and types, with the exact versions of ruff and mypy that pyproject.toml names
# make test-all  adds whole trainings, and compiles with optimizations
# make docs   builds the documentation in docs/_build/html
# make bench  prints two of the tables of bench/README.md
PYTHON ?= python3
MPI ?= mpich
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)
# As root, Open MPI asks to be told twice; other launchers ignore these.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# Containers often set this variable. Python then keeps no compiled modules, and each of the hundreds
# of processes that the tests start takes 3 s of CPU time to import JAX instead of 1.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-lm test-fast test test-oldest test-accelerators test-all lint docs bench clean

# mpi4jax and jdaso's extension are compiled. Both builds use the packages of the environment, so
# that nothing is installed twice, and mpi4jax builds beside the other installations. Its build
# needs mpicc on PATH. It takes any nvcc on PATH for a sign of CUDA beside it; CUDA_PATH set to an
# existing folder overrules that guess, so an empty one leaves the CUDA extension out.
PIP := $(BIN)/pip --quiet --disable-pip-version-check
$(VENV)/.installed: pyproject.toml setup.py $(wildcard jdaso/exchange/host/*.cc jdaso/exchange/host/*.h) Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile $(MPI) mpi4py jax 'setuptools>=77' wheel cython nanobind
	rm -rf $(VENV)/wheels && mkdir -p $(VENV)/no-cuda
	CUDA_PATH=$${CUDA_PATH:-$(CURDIR)/$(VENV)/no-cuda} $(PIP) wheel --no-cache-dir --no-deps \
		--no-build-isolation --wheel-dir $(VENV)/wheels mpi4jax & \
	$(PIP) install --no-compile --no-build-isolation -e '.[mpi,examples,dev]' && wait $$!
	$(PIP) install --no-compile $(VENV)/wheels/mpi4jax-*.whl
	touch $@

demo: $(VENV)/.installed
	rm -rf runs/demo
	mpiexec -n 2 $(BIN)/python examples/resnet50.py --model resnet20 --data digits --devices 2 --batch-size 16 \
		--learning-rate 0.025 --epochs 12 --warmup-epochs 2 --cooldown-epochs 2 --delay 2 --out runs/demo

demo-lm: $(VENV)/.installed
	rm -rf runs/demo-lm
	mpiexec -n 2 $(BIN)/python examples/language_model.py --layers 4 --width 96 --steps 400 --evaluate-every 50 \
		--period 10 --out runs/demo-lm

lint: $(VENV)/.installed
	ruff check .
	ruff format --check .
	mypy

# Each file stays with one worker. Three workers use the time in which jobs of Slurm and MPI wait; with
# four, these jobs disturb each other. tests/conftest.py orders the files.
BY_FILE := --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest --durations 15 -n

test-fast: $(VENV)/.installed
	$(PYTEST) 2 -m "not slow and not processes"

test: $(VENV)/.installed
	$(PYTEST) 3 $(BY_FILE) -m "not slow"

# In an environment of its own. pip reads the versions from this variable.
test-oldest:
	PIP_CONSTRAINT=$(CURDIR)/tests/oldest.txt $(MAKE) test VENV=.venv-oldest

# XLA compiles for a GPU with the first two wheels alone, and for a TPU with libtpu. They lie in a
# folder of their own, so that the other tests find no plugin. The third one has cuda.h, with which
# test_native.py compares.
ACCELERATORS := $(CURDIR)/$(VENV)/accelerators
$(VENV)/.accelerators: $(VENV)/.installed
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	libtpu=$$($(BIN)/python -c 'from importlib.metadata import requires; \
		print(*(x.split(";")[0] for x in requires("jax") if x.startswith("libtpu")))') && \
	$(PIP) install --no-deps --upgrade --target $(ACCELERATORS) jax-cuda12-plugin==$$version \
		jax-cuda12-pjrt==$$version nvidia-cuda-runtime-cu12 "$$libtpu"
	touch $@

test-accelerators: $(VENV)/.accelerators
	PYTHONPATH=$(ACCELERATORS) JAX_PLATFORMS=cpu $(PYTEST) 2 tests/accelerators
	CUDA_HOME=$(ACCELERATORS)/nvidia/cuda_runtime $(BIN)/python -m pytest -q \
		tests/mpi/test_native.py -k functions_of_the_driver

test-all: lint test-accelerators
	JDASO_TEST_OPTIMIZED=1 $(PYTEST) 2 $(BY_FILE)

docs: $(VENV)/.docs-installed
	$(BIN)/python docs/figures.py
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[docs]'
	touch $@

bench: $(VENV)/.installed
	mpiexec -n 2 $(BIN)/python bench/overlap.py
	$(BIN)/python bench/tax.py network --megabytes 100 --pairs 7

clean:
	rm -rf $(VENV) .venv-oldest build dist docs/_build *.egg-info runs
