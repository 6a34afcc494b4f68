# make demo   sets up .venv (MPI runtime included) and trains a ResNet with DASO on two processes
# make test   passes lint, types and tests
# make bench  prints two of the tables of bench/README.md
PYTHON ?= python3
MPI ?= mpich
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)
# As root, Open MPI asks to be told twice; other launchers ignore these.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1

.PHONY: demo test lint bench clean

# mpi4jax is built from source: mpicc must be on PATH first, hence an earlier pip call for the
# MPI runtime. Its build takes any nvcc on PATH for a sign of CUDA beside it; CUDA_PATH set to an
# existing folder overrules that guess, so an empty one leaves the CUDA extension out.
$(VENV)/.installed: pyproject.toml setup.py $(wildcard jdaso/exchange/*.cc jdaso/exchange/*.h) Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(MPI) mpi4py
	mkdir -p $(VENV)/no-cuda
	CUDA_PATH=$${CUDA_PATH:-$(CURDIR)/$(VENV)/no-cuda} \
		$(BIN)/pip install -q --disable-pip-version-check --no-cache-dir mpi4jax
	$(BIN)/pip install -q --disable-pip-version-check -e '.[mpi,mpi4jax,examples,dev]'
	touch $@

demo: $(VENV)/.installed
	rm -rf runs/demo
	mpiexec -n 2 $(BIN)/python examples/train.py --devices 2 --out runs/demo

lint: $(VENV)/.installed
	ruff check .
	ruff format --check .
	mypy

# What starts processes of its own needs all cores for them; the rest takes a core for each worker.
STARTERS := tests/mpi tests/slurm tests/bench tests/examples

test: lint
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 $(STARTERS:%=--ignore=%) --durations=10
	$(BIN)/python -m pytest $(STARTERS) --durations=25

bench: $(VENV)/.installed
	mpiexec -n 2 $(BIN)/python bench/overlap.py
	$(BIN)/python bench/overhead.py

clean:
	rm -rf $(VENV) build *.egg-info runs
