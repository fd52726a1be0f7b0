"""The tests. They mirror the packages; what they share is imported as `tests.…`."""
