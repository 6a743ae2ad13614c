"""Which trials a sweep makes."""

from jaxscale.sweep.search.grid import Grid

__all__ = ["Grid"]
