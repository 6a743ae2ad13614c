"""OLMo 3 (OLMo Team 2025): OLMo 2 with three local layers for each global one, and scaled angles in the latter only."""

from __future__ import annotations

from typing import Any

from jaxscale.interop.families import olmo2
from jaxscale.interop.families.gemma3 import by_type, by_type_json
from jaxscale.interop.families.llama import ATTENTION, ENDS, IGNORED, MLP, rotary, sizes_json
from jaxscale.interop.family import Family
from jaxscale.interop.fields import Fields
from jaxscale.interop.rope import rotary_json
from jaxscale.interop.windows import FULL, SLIDING, by_types, types_json
from jaxscale.models import TransformerConfig
from jaxscale.nn import Rotary

_BASE = 5e5


def _model(c: Fields) -> TransformerConfig:
    types = c.get("layer_types", [SLIDING if (i + 1) % 4 else FULL for i in range(c.size("num_hidden_layers"))])
    return TransformerConfig(
        **olmo2.common(c),
        **by_type(c, _BASE, c.number("rope_theta", _BASE)),
        windows=by_types(c, types, c.get("sliding_window", 4096)),
    )


def _config(m: TransformerConfig) -> dict[str, Any]:
    positions, windows = rotary(m), types_json(m)
    local = m.local_positions or positions
    # with the default base every version reads flat fields; with another, version 5 reads them only by type
    flat = positions.theta == _BASE and local == Rotary(_BASE)
    windows["sliding_window"] = windows["sliding_window"] or 4096  # not used without such layers
    return {
        **sizes_json(m),
        **(rotary_json(positions) if flat else by_type_json(positions, local)),
        **windows,
        "attention_bias": False,
    }


_TABLE = (*ENDS, *ATTENTION, *olmo2.NORMS, *MLP)
FAMILY = Family("olmo3", "Olmo3ForCausalLM", _model, _config, _TABLE, IGNORED)
