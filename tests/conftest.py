"""What every test shares: both backends, and properties that are the same in every run."""

from typing import Any

import pytest
from hypothesis import settings

# Failures inside an inherited suite show their values, as those of a test's own module do. Here,
# because it must be said before any test imports the suite.
pytest.register_assert_rewrite("turnkeeper.actors.testing")

# The same examples in every run: a red build is about the change, never about the draw.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
# For hunting: `--hypothesis-profile=search` draws anew and remembers what it found.
settings.register_profile("search", deadline=None, max_examples=2_000)
settings.load_profile("ci")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("trio", {}), id="trio"),
    ],
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run each async test twice: once on asyncio, once on trio."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend
