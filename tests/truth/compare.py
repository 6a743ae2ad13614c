"""The rule by which two trees of numbers agree: the library's own, for whoever writes a layer."""

from jaxscale.testing.compare import FLOOR, TOLERANCE, assert_leaves_agree, global_norm, path_name

__all__ = ["FLOOR", "TOLERANCE", "assert_leaves_agree", "global_norm", "path_name"]
