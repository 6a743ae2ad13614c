"""The library's public check that sharded equals unsharded."""

from jaxscale.testing.layouts import (
    QUICKLY,
    Trace,
    assert_layouts_agree,
    build,
    in_force,
    random_batch,
    remembered,
    remembering_sgd,
    to_numpy,
    train,
)

__all__ = [
    "QUICKLY",
    "Trace",
    "assert_layouts_agree",
    "build",
    "in_force",
    "random_batch",
    "remembered",
    "remembering_sgd",
    "to_numpy",
    "train",
]
