"""The library's public rule by which two trees of numbers agree."""

from jaxscale.testing.compare import FLOOR, TOLERANCE, assert_leaves_agree, global_norm, path_name

__all__ = ["FLOOR", "TOLERANCE", "assert_leaves_agree", "global_norm", "path_name"]
