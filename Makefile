# Each target does everything it needs from a fresh clone: Python 3.11 or later, make, git.

# Keeps the root off sys.path, so that a plain `import runtime` cannot load a second copy.
export PYTHONSAFEPATH = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN = .venv/bin

.PHONY: venv demo test check bench lock clean
.DELETE_ON_ERROR:

venv: .venv/installed

# A new lock makes a new environment; a changed pyproject.toml only installs the project again.
.venv/locked: requirements.lock
	@set -e; for python in python3.11 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then echo 'turnkeeper needs Python 3.11 or later on the path, as python3.11 or python3' >&2; exit 1; fi; \
	rm -rf .venv; \
	$$found -m venv .venv
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements.lock
	@touch $@

.venv/installed: .venv/locked pyproject.toml
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

test: .venv/installed
	$(BIN)/python -m pytest

lock:
	python3 -m venv .venv-lock
	.venv-lock/bin/pip install --quiet uv
	.venv-lock/bin/uv pip compile --no-config --universal --python-version 3.11 --all-extras --group dev \
	    --generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
	    pyproject.toml -o requirements.lock

clean:
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis htmlcov .coverage .coverage.*
