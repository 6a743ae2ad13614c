"""Gemma 3, text only (Gemma Team 2025): Gemma 2 with QK-norm and other rotary frequencies in local layers."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families.gemma2 import NORMS, common, common_json
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, MLP, rotary
from jaxscale.interop.families.qwen3 import QK_NORM
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.rope import read_rotary, rotary_json
from jaxscale.interop.windows import FULL, SLIDING
from jaxscale.models import TransformerConfig
from jaxscale.nn import QKNorm, Rotary, UnitOffsetRMSNorm


def _model(c: Fields) -> TransformerConfig:
    c.only("attn_logit_softcapping", None)  # transformers has the field but ignores it
    return TransformerConfig(
        **common(c, c.size("sliding_window_pattern", c.size("_sliding_window_pattern", 6)), None, None),
        **by_type(c, 1e6, c.number("rope_local_base_freq", 1e4)),
        qk_norm=QKNorm(UnitOffsetRMSNorm),
    )


def by_type(c: Fields, theta: float, local: float) -> dict[str, Any]:
    """Return rotary positions of global and local layers: by layer type, or in older files by base.

    Args:
      c: the fields.
      theta: the base of global layers if the file has none.
      local: the base of local layers if their type has none.
    """
    types = c.get("rope_parameters", {})
    if not isinstance(types, dict) or (FULL not in types and SLIDING not in types):
        return {"positions": read_rotary(c, theta), "local_positions": Rotary(local)}

    def fields(kind: str, **own: Any) -> Fields:
        return Fields({**c.values, "rope_parameters": types.get(kind), **own}, c.what)

    base, scaling = c.number("rope_theta", theta), c.get("rope_scaling", None)
    return {
        "positions": read_rotary(fields(FULL, rope_theta=base, rope_scaling=scaling)),
        "local_positions": read_rotary(fields(SLIDING, rope_theta=local, rope_scaling=None)),
    }


def _config(m: TransformerConfig) -> dict[str, Any]:
    local = m.local_positions or rotary(m)
    if local.scaling is None:  # every version reads this form
        return {**common_json(m), **rotary_json(rotary(m)), "rope_local_base_freq": local.theta}
    return {**common_json(m), **by_type_json(rotary(m), local)}


def by_type_json(positions: Rotary, local: Rotary) -> dict[str, Any]:
    """Return the fields of config.json that `by_type` reads.

    Args:
      positions: of global layers.
      local: of local layers.
    """
    return {"rope_parameters": {FULL: _parameters(positions), SLIDING: _parameters(local)}}


def _parameters(positions: Rotary) -> dict[str, Any]:
    fields = rotary_json(positions)
    scaling = fields.pop("rope_scaling", {"rope_type": "default"})
    return {**fields, **scaling}


_TABLE = (*ENDS, *ATTENTION, *QK_NORM, *NORMS, *MLP)
FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", _model, _config, _TABLE, IGNORED)
