"""A package, so that `tests.truth` is ours whatever else is installed."""
