# structured-commit. `make` lists the targets; `make demo` and `make test` set themselves up.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint format replay clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## real Harmony streams lose tool calls under speculation, and keep them with the stage
	@$(RUN) -m scripts.demo $(ARGS)

test: $(READY) ## all tests
	@$(RUN) -m pytest $(ARGS)

lint: $(READY) ## ruff: rules and format
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

format: $(READY) ## rewrite the code the way `lint` wants it
	@$(RUN) -m ruff check --fix . && $(RUN) -m ruff format .

replay: $(READY) ## replay report #17437 and print the verdict; ARGS="--json FILE" writes the figures
	@$(RUN) -m scripts.replay $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml
	@echo "setting up $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
