"""Sharded equals unsharded: the library's own check, for whoever writes a layer or a rule."""

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
