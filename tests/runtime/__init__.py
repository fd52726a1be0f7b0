"""Tests of turnkeeper.runtime, module by module."""
