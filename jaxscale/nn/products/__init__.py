"""The numbers in which layers multiply with their matrices: the values of `Transformer.products`."""

from jaxscale.nn.products.base import (
    EightBits,
    ProductRule,
    Products,
    apply_products,
    head_arithmetic,
    layers_of,
    rules_of,
)
from jaxscale.nn.products.clustered import Clustered
from jaxscale.nn.products.fp8 import Fp8
from jaxscale.nn.products.head import HeadWeight
from jaxscale.nn.products.int8 import Int8
from jaxscale.nn.products.mxfp8 import MXFP8
from jaxscale.nn.products.rounded import Rounded

__all__ = [
    "Clustered",
    "EightBits",
    "Fp8",
    "HeadWeight",
    "Int8",
    "MXFP8",
    "ProductRule",
    "Products",
    "Rounded",
    "apply_products",
    "head_arithmetic",
    "layers_of",
    "rules_of",
]
