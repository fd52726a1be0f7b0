"""A plugin for pytest that plants one fault for a whole session.

    TURNKEEPER_PLANTED="an abandoned ask is handled" pytest -p tests.simulation.planting FILE

`test_mutants` has it show that the test which a fault names does find it.
"""

from __future__ import annotations

import os

import pytest

NAME = "TURNKEEPER_PLANTED"


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> object:
    """Run the tests over the production code with the fault in it."""
    from .mutants import MUTANTS, PROMISES, planted

    (mutant,) = (m for m in (*MUTANTS, *PROMISES) if m.name == os.environ[NAME])
    with planted(mutant):
        return (yield)
