# Two commands do everything in a fresh clone: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: setup quickstart test test-slow check bench bench-gpu clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

quickstart: setup
	$(BIN)/python train_magrpo.py --config configs/magrpo_quickstart.yaml

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy comlrl trainers rewards external loggers

bench: setup
	$(BIN)/python benchmarks/bench_reward.py
	$(BIN)/python benchmarks/bench_train_step.py --rounds 1
	$(BIN)/python benchmarks/bench_scaling.py --steps 2
	$(BIN)/python benchmarks/bench_memory.py

bench-gpu: setup
	$(BIN)/python benchmarks/bench_train_step.py --device cuda
	$(BIN)/python benchmarks/bench_memory.py --device cuda

clean:
	rm -rf $(VENV) outputs build
