# Everything runs in .venv, which each target makes and fills by itself: `make run` and `make test`
# need Python 3.11 or newer, make, and no root.
.DEFAULT_GOAL := help
.PHONY: help run test check bench test-vllm clean

VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.run-stamp
DEV := $(VENV)/.dev-stamp
ARGS ?=
DIR ?=
# Of several Pythons the one that most of the packages have wheels for comes first.
PYTHON ?= python3.12 python3.11 python3.13 python3

# $(call install,WHAT,WORDS): pip's own output goes to a log, a failure to one line.
define install
	@echo "fairlane: installing $(2) into $(VENV), once (log: $(VENV)/pip.log)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input -e '$(1)' \
	    >$(VENV)/pip.log 2>&1 || { \
	  why=$$(grep '^ERROR' $(VENV)/pip.log | tail -n 1); \
	  echo "fairlane: pip could not install the packages, is the package index reachable?" \
	    "$${why:-(no reason given)} (log: $(VENV)/pip.log)" >&2; exit 1; }
endef

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Words for the command go in ARGS: make run ARGS='--backend http://gpu1:8000'"

run: $(RUN) ## start Fairlane on this machine; needs no Redis and no engine
	@$(BIN)/fairlane up $(ARGS)

test: $(DEV) ## all tests; ARGS for pytest instead
ifeq ($(ARGS),)
	@$(BIN)/python -m pytest -n 2 --dist worksteal tests/unit tests/scripts tests/stateful tests/flow
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/real tests/test_*.py
else
	@$(BIN)/python -m pytest $(ARGS)
endif

check: $(DEV) ## lint, format, types, import rules, the code's own rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest tests/test_tidy.py tests/test_tidy_lua.py

bench: $(DEV) ## measure on a real Redis, in wall-clock time
	@$(BIN)/python -m bench $(ARGS)

test-vllm: $(DEV) ## test against a real vLLM: make test-vllm DIR=folder for it (2.5 GB)
	@test -n '$(DIR)' || { echo "usage: make test-vllm DIR=folder" >&2; exit 2; }
	@$(BIN)/python -m bench.vllm --dir '$(DIR)' $(ARGS)

clean: ## remove .venv and all that tools leave behind
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache bench/out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@set -e; found=; \
	for name in $(PYTHON); do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    found=$$name; break; \
	  fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "fairlane: Python 3.11 or newer is needed, and none of these is: $(PYTHON)" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	  echo "fairlane: $$found lacks its venv module: apt install python3-venv" >&2; exit 1; \
	fi; \
	"$$found" -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

$(RUN): pyproject.toml $(BIN)/python
	$(call install,.,Fairlane)
	@touch $@

# What the tests need includes what a run needs.
$(DEV): pyproject.toml $(BIN)/python
	$(call install,.[dev],Fairlane and its development tools)
	@touch $(RUN) $@
