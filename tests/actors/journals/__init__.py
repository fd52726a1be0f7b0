"""The journals."""
