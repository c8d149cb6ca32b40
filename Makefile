# Two commands for a fresh machine: `make run` (the main job) and `make test`.  Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= auto
# Tests start hundreds of processes: these find the package compiled, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
FEDERATION ?= tests/federation tests/test_tutorials.py

.PHONY: run test test-optimised test-federation test-wheels lint docs clean
.DELETE_ON_ERROR:

run: .venv/ready
	$(BIN)/fedbilevel table1 --out runs/table1
	$(BIN)/fedbilevel report runs/table1

test: .venv/ready
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-optimised: .venv/ready
	FEDBILEVEL_OPTIMISED=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-federation: .venv/ready
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m federation $(FEDERATION)

test-wheels: .venv/ready
	$(BIN)/python -m pytest -q -m packaging tests/test_packaging.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedbilevel needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv runs build
