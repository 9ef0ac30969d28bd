# Works with GNU make 3.81 (macOS) and later.
SHELL  := /bin/bash
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp-dev
PYTHON ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## run the small experiment; results in runs/demo
	$(BIN)/python -m bethenet.experiments.demo

test: check ## check, then the tests
	$(BIN)/python -m pytest

check: $(STAMP) ## lint, format and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy --strict src

clean: ## remove .venv, caches and build output (runs/ stays)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A virtual environment with everything `dev` needs, made again when either file changes.
$(STAMP): pyproject.toml constraints.txt
	@found=; \
	for p in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found="$$p"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "error: Python 3.11 or later is needed; none was found (name one with: make PYTHON=/path/to/python3)" >&2; \
	  exit 1; \
	fi; \
	if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	  echo "setting up $(VENV) with $$("$$found" --version); installing PyTorch can take some minutes"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@
