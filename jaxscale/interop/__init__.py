"""Read and write Hugging Face checkpoints."""

from jaxscale.interop.companions import Companions, copy_companions
from jaxscale.interop.families import FAMILIES
from jaxscale.interop.family import Family, family_for, family_of, same_model
from jaxscale.interop.hub import local_folder
from jaxscale.interop.maps import Map, fused
from jaxscale.interop.pretrained import Pretrained, open_pretrained
from jaxscale.interop.safetensors import SafeTensors

__all__ = [
    "FAMILIES",
    "Companions",
    "Family",
    "Map",
    "Pretrained",
    "SafeTensors",
    "copy_companions",
    "family_for",
    "family_of",
    "fused",
    "local_folder",
    "open_pretrained",
    "same_model",
]
