"""Tests of turnkeeper.actors, module by module."""
