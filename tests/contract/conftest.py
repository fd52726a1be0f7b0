"""Failures inside an inherited suite show their values, as those of a test's own module do."""

import pytest

pytest.register_assert_rewrite("turnkeeper.actors.testing")
