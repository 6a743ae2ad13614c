"""Objectives beside `NextToken`, a file each (`train.objective`)."""

from jaxscale.step.objectives.masked_token import MaskedToken

__all__ = ["MaskedToken"]
