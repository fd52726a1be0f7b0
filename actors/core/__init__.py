"""The pure core: the folds of a log, and the decisions that follow from them."""
