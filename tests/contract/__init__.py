"""One suite for each port, run against the real thing and the fake."""
