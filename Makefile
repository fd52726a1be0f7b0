# Each target does everything it needs from a fresh clone: Python 3.11 or later, make, git.

# Keeps the root off sys.path, so that a plain `import runtime` cannot load a second copy.
export PYTHONSAFEPATH = 1
# Compiled modules are kept: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =
export PIP_DISABLE_PIP_VERSION_CHECK = 1

VENV = .venv
BIN = $(VENV)/bin
# One process for each core; those that are done early take work from the others.
PYTEST = $(BIN)/python -m pytest
ON_ALL_CORES = -n logical --dist worksteal
# The tests of a whole sweep that have passed, and, if given, which part of them to run: 2/3.
SWEPT = .pytest_cache/swept-$(shell git rev-parse HEAD 2>/dev/null)$(if $(PART),-$(subst /,-of-,$(PART)))
PART =

# The first Python on the path that is new enough.
FIND_PYTHON = set -e; for python in $(PYTHON) python3.11 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	    python=; \
	done; \
	if [ -z "$$python" ]; then echo 'turnkeeper needs Python 3.11 or later on the path, as python3.11 or python3' >&2; exit 1; fi

# Those that the project supports; each is tried if it is there.
PYTHONS = python3.11 python3.12 python3.13 python3.14

.PHONY: help venv demo inspect test quick sweep test-all-pythons check cover hooks soak seek bench docs dist lock clean

help:
	@echo 'make demo    a conversation, with what the library keeps right about it'
	@echo 'make inspect the journal that the demonstration leaves, in the browser'
	@echo 'make quick   the tests of the core, the runtime and the contract, within a minute'
	@echo 'make test    all tests; of sweeps a share that the commit draws'
	@echo 'make sweep   the sweeps, whole; goes on after an interruption; PART=2/3 runs a third'
	@echo 'make check   style, spelling, words, imports, the wheel, its types'
	@echo 'make cover   the tests, and which branches they run'
	@echo 'make hooks   check style and spelling before each commit'
	@echo 'make soak    simulated conversations for SOAK_MINUTES, 30 by default'
	@echo 'make seek    how long the simulator seeks each planted fault'
	@echo 'make bench   the benchmarks, into benchmarks/RESULTS.md'
	@echo 'make docs    the documentation site, in build/docs/site'
	@echo 'make dist    the wheel and the source distribution of a release, checked'
	@echo 'make lock    write requirements.lock again; this one needs the network for uv'
	@echo 'make clean   remove what the others made'
	@echo 'make test-all-pythons   the tests, on each Python of PYTHONS that is there'

venv: $(VENV)/installed

# A new lock makes a new environment; a changed pyproject.toml only installs the project again.
$(VENV)/locked: requirements.lock
	@$(FIND_PYTHON); rm -rf $(VENV); $$python -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --no-deps --require-hashes -r requirements.lock
	@touch $@

$(VENV)/installed: $(VENV)/locked pyproject.toml
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: $(VENV)/installed
	@rm -f demo.db demo.db-*
	$(BIN)/turnkeeper demo --db demo.db

# Shows the journal that the demonstration left, in the browser.
inspect: $(VENV)/installed
	@test -f demo.db || $(MAKE) --no-print-directory demo
	$(BIN)/turnkeeper inspect demo.db

test: $(VENV)/installed
	$(PYTEST) $(ON_ALL_CORES)

quick: $(VENV)/installed
	$(PYTEST) $(ON_ALL_CORES) --backend asyncio -m 'not slow and not sweep' tests/runtime \
	    tests/actors/core tests/actors/values tests/contract/test_journal.py::TestMemoryJournal

# After an interruption it goes on: what has passed at a commit is kept until all has. A test that
# takes seconds of a usual run may take an hour of this one.
sweep: $(VENV)/installed
	$(PYTEST) $(ON_ALL_CORES) --whole -m sweep -o faulthandler_timeout=3600 \
	    --done=$(SWEPT) $(if $(PART),--part=$(PART))
	@rm -f $(SWEPT)

test-all-pythons:
	@for python in $(PYTHONS); do \
	    if version=$$($$python -c 'import platform; print(platform.python_version())' 2>/dev/null); then \
	        $(MAKE) --no-print-directory test PYTHON=$$python VENV=.venv-$$version || exit 1; \
	    else echo "no $$python here: not tried"; fi; \
	done

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell . .ci .github
	$(BIN)/python tools/check_words.py
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_wheel.py

# Counts what runs in processes of the tests' own; fails below the floor in pyproject.toml.
cover: $(VENV)/installed
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ON_ALL_CORES)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

hooks: $(VENV)/installed
	ln -sf "$(CURDIR)/tools/pre-commit" "$$(git rev-parse --git-path hooks/pre-commit)"

soak: $(VENV)/installed
	$(PYTEST) -m slow tests/simulation

# CPU seconds to the first detection of each planted fault; twenty minutes.
seek: $(VENV)/installed
	$(BIN)/python tools/seek_faults.py

# Named as a folder, not with -m: that needs the root on sys.path.
bench: $(VENV)/installed
	$(BIN)/python benchmarks

docs: $(VENV)/installed
	$(BIN)/python tools/build_docs.py

# Fails, too, at what breaks callers of the last release: a minor release may, with CHECK_API=-.
dist: $(VENV)/installed
	$(BIN)/python tools/build_release.py
	$(CHECK_API)$(BIN)/python tools/check_api.py

# Keeps the pins it finds; remove requirements.lock first to renew all of them.
lock:
	@$(FIND_PYTHON); $$python -m venv .venv-lock
	.venv-lock/bin/pip install --quiet uv
	.venv-lock/bin/uv pip compile --no-config --quiet --universal --python-version 3.11 \
	    --all-extras --group dev --generate-hashes \
	    --no-header --no-emit-index-url --no-emit-find-links pyproject.toml -o requirements.lock

clean:
	rm -rf .venv .venv-* build dist *.egg-info htmlcov .coverage .coverage.* \
	    .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
