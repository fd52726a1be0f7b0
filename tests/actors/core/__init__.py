"""The pure core: folds and decisions."""
