# PYTHON runs the tools; it needs the packages of `pip install -e '.[dev]'`.
PYTHON ?= python

# what scripts in bench/ need that `.[dev]` does not install
NOT_INSTALLED = ^(from|import) (agents|instructor|langchain|pydantic_ai)

.PHONY: help check lint types test schema reference models prices docs lock lock-check image

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

check:  ## everything CI runs, in a fresh virtual environment
	bash .ci/run

lint:  ## ruff: rules and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:  ## mypy, strict, over gateway, tests and bench
	$(PYTHON) -m mypy
	for folder in bench bench/clients; do \
		MYPYPATH=$$folder $(PYTHON) -m mypy $$(grep -LE '$(NOT_INSTALLED)' $$folder/*.py) || exit; \
	done

test:  ## the tests
	$(PYTHON) -m pytest -q -n auto

schema:  ## write config/gateway.schema.json anew after a change of gateway/config/
	$(PYTHON) -m gateway schema > config/gateway.schema.json

reference:  ## write docs/reference/ anew after a change of keys, headers, errors, paths or commands
	$(PYTHON) .ci/reference.py

models:  ## what is known of each model, and which models no table names yet; NAMES="haiku gpt" for some
	$(PYTHON) .ci/models.py $(NAMES)

prices:  ## write config/prices.json.gz and config/ranks/ anew from the installed litellm
	$(PYTHON) .ci/prices.py

docs:  ## build the site of docs/ into site/, every link and anchor checked; needs `pip install -e '.[docs]'`
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

# `uv pip compile` needs uv (pip install uv) and the package index. The files name no index: pip uses its own.
LOCK = uv pip compile --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' --upgrade --quiet

lock:  ## pin every package with its hashes; the same files for Python 3.11 to 3.13
	$(LOCK) pyproject.toml -o requirements.lock
	$(LOCK) pyproject.toml --extra dev -c requirements.lock -o requirements-dev.lock
	$(PYTHON) .ci/check_lock.py --small | $(LOCK) - -c requirements.lock -o requirements-small.lock

lock-check:  ## whether the lock files still fit pyproject.toml; asks no index
	$(PYTHON) .ci/check_lock.py

image:  ## the container image
	docker build -t llm-session-gateway .
