# Two commands for a fresh clone on a machine with only Python: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# `pip install torch` on Linux brings gigabytes of CUDA; constraints.txt pins the release that is tested.
# Python compiles a file when it is first imported; pip would compile all of them, which takes as long as the rest.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# Images of containers set it. Without compiled files each of the tests' processes compiles PyTorch (or Keras) again.
unexport PYTHONDONTWRITEBYTECODE
MAKEFLAGS += --no-print-directory

.PHONY: demo test others checks lint types layers docs pytorch fast heavy nightly frameworks keras-torch keras-tensorflow keras-jax tensorflow experiments reproduce wheel versions bench ledger gpu-check clean

demo: .venv/demo.stamp
	$(BIN)/mezzo compare --demo digits --out mezzo-compare-digits

# `make test PYTEST_FLAGS="--random-order 7"` shuffles files, and the tests of each file.
# PyTorch's tests have two processes, which show how far they are; what else there is runs next to them, one after the
# other, and two at a time after their end. So no core waits for the other's last test.
test: .venv/test.stamp
	$(MAKE) --jobs=2 pytorch others

CHECKS := lint types layers docs
FRAMEWORKS := keras-torch keras-tensorflow keras-jax tensorflow

others: .venv/test.stamp
	$(MAKE) --output-sync=target $(CHECKS) $(FRAMEWORKS) experiments

checks: .venv/test.stamp
	$(MAKE) --jobs=2 $(CHECKS)

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test.stamp
	$(BIN)/mypy

layers: .venv/test.stamp
	$(BIN)/lint-imports

# The site, in site/. Every warning is an error, such as a broken link. `make docs DOCS=serve` shows it at http://127.0.0.1:8000 while you write.
DOCS := build
docs: .venv/test.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(DOCS) --strict

OTHERS := tests/on_keras tests/on_tensorflow

# The daily tests of PyTorch; `fast` and `heavy` are the two halves. `nightly` has more forms of what they test.
pytorch: SELECTED := not nightly
fast: SELECTED := not heavy and not nightly
heavy: SELECTED := heavy and not nightly
nightly: SELECTED := nightly
pytorch fast heavy nightly: .venv/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal -m "$(SELECTED)" $(PYTEST_FLAGS) $(OTHERS:%=--ignore=%)

# The whole of Keras's tests on PyTorch, and what depends on the backend on the other two. A process has one Keras backend,
# that of its first import; and TensorFlow stays out of the processes of PyTorch's tests.
# Each process pays for the start of TensorFlow or JAX, so there is one for each backend, and two at a time.
frameworks: .venv/test.stamp
	$(MAKE) --jobs=2 --output-sync=target $(FRAMEWORKS)

keras-torch: SELECTED := not nightly
keras-tensorflow keras-jax: SELECTED := every_backend and not nightly
keras-torch keras-tensorflow keras-jax: .venv/test.stamp
	OMP_NUM_THREADS=1 KERAS_BACKEND=$(@:keras-%=%) $(BIN)/pytest -q -m "$(SELECTED)" $(PYTEST_FLAGS) tests/on_keras

tensorflow: .venv/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not nightly" $(PYTEST_FLAGS) tests/on_tensorflow

# The original paper's experiments, small: fails when a finding no longer shows. docs/dev/reproduce.md has the full size.
# `experiments` runs the one that takes less than half a minute.
experiments: .venv/test.stamp
	$(BIN)/python experiments/run_all.py --only accumulation --out mezzo-reproduce-quick

reproduce: .venv/test.stamp
	$(BIN)/python experiments/run_all.py --out mezzo-reproduce-quick

# dist/ with the wheel and the source distribution, after the wheel has worked in a clean environment.
wheel: .venv/test.stamp
	rm -rf dist
	$(BIN)/pytest -q tests/test_wheel.py
	$(BIN)/python -m build --outdir dist

# The fast tests against several releases of PyTorch; the newer ones bring gigabytes. `make versions VERSIONS="2.13.0 2.14.1"` for some.
versions: .venv/test.stamp
	$(BIN)/python benchmarks/versions.py $(VERSIONS)

# Times want a quiet machine. `make bench BENCH="--only gpt --mode eager"` for a part; benchmarks/readme.py fills the pages.
bench: .venv/test.stamp
	$(BIN)/python benchmarks/bench.py $(BENCH)

# Every figure against the committed one: exit status 1 where one is worse. `make ledger PART=sizes,cases` for a part; all take about an hour.
ledger: .venv/test.stamp
	$(BIN)/python benchmarks/ledger.py $(PART:%=--part %) $(LEDGER)

# For the owner of any CUDA GPU: one JSON file under benchmarks/results/, and a table. Without a GPU it exits with 2.
gpu-check: .venv/test.stamp
	$(BIN)/python benchmarks/gpu_check.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

.venv/test.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps 'tf_keras==2.21.*'  # it asks for the package `tensorflow`; tensorflow-cpu is the same without CUDA
	touch $@

clean:
	rm -rf .venv .versions dist build site mezzo-compare* mezzo-reproduce* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
