"""The simulator's campaigns, sweeps and mutants."""
