# Every target sets up what it needs; the second run starts at once. `make help` lists them.

VENV := .venv
BIN := $(VENV)/bin
NODE_DIR := tests/cloudflare
NODE_STAMP := $(NODE_DIR)/node_modules/.stamp

# The first Python that really runs and is new enough (a version manager's shim may exist and still refuse).
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)

# Node 20 or newer, or nothing: then the tests that need it are skipped and say why. `make test NODE=` does without.
NODE ?= $(shell command -v npm >/dev/null 2>&1 \
	&& node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null && echo node)

PYTEST_FLAGS ?= -n 3 --dist loadgroup

# The fast tests of the core on SQLite; with a word such as ARGS=batch, those with it in their name on all stores.
QUICK := tests/rules tests/fundamentals tests/contract tests/engine
QUICK_TESTS := not slow and not nightly and not cloudflare
SHUFFLE := $(or $(SHUFFLE),$(shell date +%s))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help demo example-contracts test quick nightly check proof proof-full bench bench-peers mutants lines clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do \
		printf '  %-14s %s\n' "$$name" "$$what"; done

demo: $(VENV)/.demo  ## see jobs run, fail, retry and finish, on a database of its own
	@$(BIN)/duly demo

example-contracts: $(VENV)/$(if $(findstring postgres,$(ARGS)),.stamp,.demo)  ## see each promise kept, by real processes (ARGS="--url postgresql://…")
	@$(BIN)/python -m examples.contracts.run $(ARGS)

test: $(VENV)/.stamp $(VENV)/.pgbouncer $(if $(NODE),$(NODE_STAMP))  ## run every test on SQLite, PostgreSQL and D1 (more flags: ARGS="-k claim")
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not nightly" $(ARGS)

quick: $(VENV)/.stamp  ## run the core's fast tests on SQLite, or those of a word on every store (ARGS=batch)
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) $(QUICK) -m "$(QUICK_TESTS)" -k "$(or $(ARGS),not postgres and not d1)"

nightly: export DULY_TEST_READY := 1000000
nightly: $(VENV)/.stamp $(VENV)/.pgbouncer $(if $(NODE),$(NODE_STAMP))  ## run all tests in a random order, the long proof and all mutants: 3 hours
	@echo "SHUFFLE=$(SHUFFLE)"; $(BIN)/python -m pytest $(PYTEST_FLAGS) --shuffle $(SHUFFLE) $(ARGS)
	@$(BIN)/python -m tests.proof --full
	@$(BIN)/python -m tests.mutants
	@$(BIN)/python -m tests.mutants --generated --sample 300

check: $(VENV)/.stamp  ## lint, format, types and layers: what CI runs before the tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

proof: $(VENV)/.stamp $(VENV)/.pgbouncer  ## show by kills, crashes and simulation that the promises hold: 8 minutes (ARGS="--only P6 --seed 7")
	@$(BIN)/python -m tests.proof $(ARGS)

proof-full: $(VENV)/.stamp $(VENV)/.pgbouncer  ## all rows and controls, in their long forms: up to 90 minutes
	@$(BIN)/python -m tests.proof --full $(ARGS)

bench: $(VENV)/.stamp  ## measure, beside what the bare database can do
	@$(BIN)/python -m bench $(ARGS)

bench-peers: $(VENV)/.stamp  ## measure beside other queues (ARGS="--quick", "--only duly,pgqueuer", "--idle")
	@$(BIN)/python -m bench.field $(ARGS)

mutants: $(VENV)/.stamp  ## break the code on purpose and see tests fail (ARGS="--sample 40", "--changed", "-k claim")
	@$(BIN)/python -m tests.mutants $(ARGS)

lines:  ## print the package's lines by folder beside their budgets; fails above the limit
	@$(PYTHON) tools/lines.py

clean:  ## remove everything the other targets made
	rm -rf $(VENV) bench/.peers $(NODE_DIR)/node_modules build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# What a demo needs, in a few seconds. The build tools come first and pinned, so that nothing is fetched behind the
# constraints' back.
$(VENV)/.demo: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "duly needs Python 3.11 or newer, and found none as python3, python3.13, python3.12 or python3.11." >&2; \
		echo "Install one, or name it: make $(or $(MAKECMDGOALS),help) PYTHON=/path/to/python3" >&2; exit 1; fi
	@$(BIN)/python -c 'import pip' 2>/dev/null || { \
		if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing python3-venv, which this Python lacks"; \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null </dev/null; fi; \
		echo "Making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV) || { \
			echo "$(PYTHON) cannot make a virtual environment. On Debian: apt-get install python3-venv" >&2; exit 1; }; }
	@echo "Installing duly"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

# What everything else needs: all extras, and the tools of the group dev, which older versions of pip do not know.
$(VENV)/.stamp: $(VENV)/.demo
	@echo "Installing what the tests need"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[all]' --group dev
	@touch $@

# PgBouncer for its tests and for P18, unpacked and not installed; without it they say how to get it.
$(VENV)/.pgbouncer: $(VENV)/.stamp
	@$(BIN)/python -m tests.servers.pgbouncer && touch $@ || true

$(NODE_STAMP): $(NODE_DIR)/package.json
	@echo "Installing the Cloudflare runtime (make test NODE= does without)"
	@cd $(NODE_DIR) && npm install --ignore-scripts --no-audit --no-fund --no-save --package-lock=false --loglevel=error </dev/null
	@touch $@
