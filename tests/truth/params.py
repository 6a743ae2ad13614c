"""The library's public function for random parameters, none of which has a special value."""

from jaxscale.testing.params import random_params

__all__ = ["random_params"]
