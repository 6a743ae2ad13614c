"""Mixers with a state of fixed size, values of `Block.mixer`: linear attention with decay, the delta rule, Mamba-2."""

from jaxscale.nn.mixers.gated_delta_net import GatedDeltaNet

__all__ = ["GatedDeltaNet"]
