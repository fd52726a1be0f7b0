# Each target does everything it needs from a fresh clone: Python 3.11 or later, make, git.

# Keeps the root off sys.path, so that a plain `import runtime` cannot load a second copy.
export PYTHONSAFEPATH = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN = .venv/bin

# The first Python on the path that is new enough.
FIND_PYTHON = set -e; for python in python3.11 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	    python=; \
	done; \
	if [ -z "$$python" ]; then echo 'turnkeeper needs Python 3.11 or later on the path, as python3.11 or python3' >&2; exit 1; fi

.PHONY: help venv demo test check soak bench lock clean

help:
	@echo 'make demo    a conversation, with what the library keeps right about it'
	@echo 'make test    the tests'
	@echo 'make check   style, imports, the wheel, its types'
	@echo 'make soak    simulated conversations for as long as SOAK_MINUTES say'
	@echo 'make bench   the benchmarks'
	@echo 'make lock    write requirements.lock again; this one needs the network for uv'
	@echo 'make clean   remove what the others made'

venv: .venv/installed

# A new lock makes a new environment; a changed pyproject.toml only installs the project again.
.venv/locked: requirements.lock
	@$(FIND_PYTHON); rm -rf .venv; $$python -m venv .venv
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements.lock
	@touch $@

.venv/installed: .venv/locked pyproject.toml
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: .venv/installed
	$(BIN)/turnkeeper demo

test: .venv/installed
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_wheel.py

# Named as a folder, not with -m: that needs the root on sys.path.
# As long as SOAK_MINUTES say; 30 if they say nothing.
soak: .venv/installed
	$(BIN)/python -m pytest -m slow tests/simulation

bench: .venv/installed
	$(BIN)/python benchmarks

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
