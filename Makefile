# make train | test | lint | audit | clean, with Python 3.10 to 3.12, venv and pip; the rest is installed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
ARGS ?=
DRAWS ?= 500
SEED ?= $(shell date +%s000)

.PHONY: help train test test-slow test-fuzz test-gpu lint clean

help:
	@echo "make train [ARGS='schedule=gpipe trainer.max_epochs=2']  train the default experiment"
	@echo "make test  [ARGS='-k layout']                            run the quick tests"
	@echo "make test-slow                                           run all the others"
	@echo "make test-fuzz [DRAWS=500] [SEED=123]                    run random configurations"
	@echo "make test-gpu                                            run those that need a GPU"
	@echo "make lint                                                ruff and mypy"
	@echo "make audit                                               known faults of what constraints.txt pins"
	@echo "make clean                                               remove what was built and run"
	@echo "PYTHON=python3.12 chooses the interpreter of a new $(VENV),"
	@echo "CONSTRAINTS=tests/oldest.txt other versions for it"

train: $(VENV)/.installed-examples
	$(BIN)/lightning-pipeline train $(ARGS)

# tests/conftest.py says which tests are quick; `--cases all` runs both kinds.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --cases quick $(ARGS)

test-slow: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --cases rest $(ARGS)

# The seeds of the draws are in the ids of the tests: SEED=THAT DRAWS=1 repeats one.
test-fuzz: SEED := $(SEED)
test-fuzz: $(VENV)/.installed-test
	SEED=$(SEED) DRAWS=$(DRAWS) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n 2 -m fuzz tests/distributed/test_fuzz.py $(ARGS)

# One process: the tests that need a CUDA device, which `make test` skips where there is none.
test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Strict: what the database could not be asked about is a failure, too.
audit: | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache outputs checkpoints lightning_logs
	find . -name __pycache__ -not -path "./$(VENV)/*" -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra: what a target needs is installed once, and again when it changes.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) -e ".[$*]"
	$(if $(filter test dev,$*),$(INSTALL) --no-deps timm)
	@touch $@
