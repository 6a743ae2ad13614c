"""Parameters none of which is at a special value: the library's own, for whoever writes a layer."""

from jaxscale.testing.params import random_params

__all__ = ["random_params"]
