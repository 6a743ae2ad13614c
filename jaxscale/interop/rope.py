"""Convert rotary positions to and from config.json: `rope_theta` with `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxscale.errors import CheckpointError, ConfigError, near
from jaxscale.interop.fields import Fields, is_number, short
from jaxscale.nn import LinearScaling, Llama3Scaling, LongRopeScaling, ProportionalScaling, Rotary, YarnScaling
from jaxscale.nn.rotary import RotaryScaling

Json = dict[str, Any]


def read_rotary(c: Fields, theta: float = 10000.0, *, fraction: float | None = None, longrope: bool = False) -> Rotary:
    """Read the rotary positions of a config.json.

    Args:
      c: its fields.
      theta: the base if the file has none.
      fraction: the rotated share of a head if the file has none; `None` for families that always rotate all of it.
      longrope: allow LongRoPE, which families other than Phi-3 read differently.

    Raises:
      CheckpointError: the scaling is unknown, or the file has two different ones.
    """
    entry = _rope_fields(c)
    base = _number(entry, "rope_theta", c) or c.number("rope_theta", theta)
    if fraction is not None:
        outside = c.number("partial_rotary_factor", fraction)
        fraction = _number(entry, "partial_rotary_factor", c) or outside
    scaling = read_scaling(entry, c)
    if isinstance(scaling, LongRopeScaling) and not longrope:
        raise CheckpointError(f"{c.what} has the rope type 'longrope', which is supported for Phi-3 only")
    return Rotary(base, scaling, 1.0 if fraction is None else fraction)


def _rope_fields(c: Fields) -> Json:
    """Return the content of `rope_parameters` or, in older files, `rope_scaling`."""
    new, old = (c.get(name, None) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, entry in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(entry, dict):
            raise CheckpointError(f"{c.what} has {name} = {entry!r}, which is not an object")
    beside = {name: c.get(name, None) for name in ("rope_theta", "partial_rotary_factor")}
    if new and old and _normalized({**beside, **new}) != _normalized({**beside, **old}):
        raise CheckpointError(f"{c.what} has rope_parameters and rope_scaling, which differ; remove one of them")
    return dict(new or old)


def _normalized(entry: Json) -> Json:
    kind = entry.get("rope_type") or entry.get("type") or "default"
    return {**{k: v for k, v in entry.items() if k != "type" and v is not None}, "rope_type": kind}


def _number(entry: Json, name: str, c: Fields) -> float | None:
    value = entry.pop(name, None)
    return None if value is None else Fields({name: value}, c.what).number(name)


def read_scaling(entry: Json, c: Fields) -> RotaryScaling | None:
    """Read the scaling of a `rope_scaling`.

    Args:
      entry: the content of `rope_scaling`, without `rope_theta`.
      c: the fields of config.json.

    Raises:
      CheckpointError: its type, or one of its fields, is unknown or invalid.
    """
    entry = dict(entry)
    kind = entry.pop("rope_type", None) or entry.get("type") or "default"
    entry.pop("type", None)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(f"{c.what} has the rope type {short(kind)}{near(str(kind), SCALINGS)}")
    for name, value in entry.items():
        several = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(x, bool) or (is_number(x) and x >= 0) for x in several):
            raise CheckpointError(
                f"{c.what} has {name} = {short(value)} in its rope_scaling, which is not a number of 0 or more"
            )
    try:
        scaling = SCALINGS[kind][0](entry, c)
    except KeyError as e:
        raise CheckpointError(f"{c.what} has no {e} in its rope_scaling, which the type '{kind}' needs") from None
    except ConfigError:
        raise  # it explains itself
    except (TypeError, ValueError, ArithmeticError) as e:
        raise CheckpointError(f"{c.what} has a rope_scaling of type '{kind}' that cannot be read: {e}") from None
    unused = {k: v for k, v in entry.items() if v is not None}
    if unused:
        raise CheckpointError(
            f"{c.what} has {next(iter(unused))} in its rope_scaling, which the type '{kind}' does not use"
        )
    return scaling


def rotary_json(rotary: Rotary) -> Json:
    """Return fields of config.json for rotary positions: `rope_theta` and `rope_scaling`, which every version reads.

    Args:
      rotary: the positions.

    Raises:
      CheckpointError: config.json cannot express the scaling.
    """
    out: Json = {"rope_theta": rotary.theta}
    if rotary.fraction != 1:
        out["partial_rotary_factor"] = rotary.fraction
    if rotary.scaling is None:
        return out
    for kind, (_, back) in SCALINGS.items():
        entry = back(rotary.scaling)
        if entry is not None:
            return {**out, "rope_scaling": {"rope_type": kind, **entry}}
    raise CheckpointError(
        f"config.json cannot express {rotary.scaling!r}; its rope types are {', '.join(sorted(SCALINGS))}"
    )


def _proportional(entry: Json, c: Fields) -> RotaryScaling:
    return ProportionalScaling(float(entry.pop("partial_rotary_factor", 1.0)), float(entry.pop("factor", 1.0)))


def _proportional_back(s: RotaryScaling) -> Json | None:
    if not isinstance(s, ProportionalScaling):
        return None
    return {"partial_rotary_factor": s.fraction, **({} if s.factor == 1 else {"factor": s.factor})}


def _linear(entry: Json, c: Fields) -> RotaryScaling:
    return LinearScaling(float(entry.pop("factor")))


def _linear_back(s: RotaryScaling) -> Json | None:
    return {"factor": s.factor} if type(s) is LinearScaling else None


def _llama3(entry: Json, c: Fields) -> RotaryScaling:
    return Llama3Scaling(
        float(entry.pop("factor")),
        float(entry.pop("low_freq_factor")),
        float(entry.pop("high_freq_factor")),
        int(_original_length(entry, c) or c.get("max_position_embeddings")),
    )


def _original_length(entry: Json, c: Fields) -> int | None:
    """Return the one beside the scaling, else the one in it, as transformers does."""
    inside = entry.pop("original_max_position_embeddings", None)
    return c.get("original_max_position_embeddings", inside)


def _llama3_back(s: RotaryScaling) -> Json | None:
    if type(s) is not Llama3Scaling:
        return None
    return {
        "factor": s.factor,
        "low_freq_factor": s.low_freq_factor,
        "high_freq_factor": s.high_freq_factor,
        "original_max_position_embeddings": s.original_length,
    }


def _yarn(entry: Json, c: Fields) -> RotaryScaling:
    length = _original_length(entry, c) or c.get("max_position_embeddings")
    truncate, attention = entry.pop("truncate", None), entry.pop("attention_factor", None)
    scaling = YarnScaling(
        float(entry.pop("factor")),
        float(entry.pop("beta_fast", None) or 32.0),
        float(entry.pop("beta_slow", None) or 1.0),
        int(length),
        **_mscale(entry, c),
        whole_dims=truncate is None or bool(truncate),
    )
    if attention is not None and not math.isclose(attention, scaling.temperature, rel_tol=1e-6):
        raise CheckpointError(
            f"{c.what} has attention_factor = {attention} in its rope_scaling, but only that which follows from its "
            f"factor, {scaling.temperature}, is supported"
        )
    return scaling


def _mscale(entry: Json, c: Fields) -> dict[str, float]:
    """Read DeepSeek's `mscale` and `mscale_all_dim`; `mscale` alone has no effect on cosine and sine."""
    one, all_dim = (float(entry.pop(name, None) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if all_dim and not one:
        raise CheckpointError(f"{c.what} has mscale_all_dim but no mscale in its rope_scaling; it needs both or none")
    return {"mscale": one, "mscale_all_dim": all_dim} if all_dim else {}


def _yarn_back(s: RotaryScaling) -> Json | None:
    if type(s) is not YarnScaling:
        return None
    return {
        "factor": s.factor,
        "beta_fast": s.beta_fast,
        "beta_slow": s.beta_slow,
        "original_max_position_embeddings": s.original_length,
        **({} if s.whole_dims else {"truncate": False}),
        **({"mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim} if s.mscale_all_dim else {}),
    }


def _longrope(entry: Json, c: Fields) -> RotaryScaling:
    entry.pop("original_max_position_embeddings", None)  # transformers uses only the one beside the scaling
    length = c.size("original_max_position_embeddings", 4096)
    factor, attention = entry.pop("factor", None), entry.pop("attention_factor", None)
    return LongRopeScaling(
        tuple(entry.pop("short_factor")),
        tuple(entry.pop("long_factor")),
        int(length),
        float(factor or c.size("max_position_embeddings") / length),
        None if attention is None else float(attention),
    )


def _longrope_back(s: RotaryScaling) -> Json | None:
    if type(s) is not LongRopeScaling:
        return None
    entry = {"short_factor": list(s.short), "long_factor": list(s.long), "factor": s.factor}
    entry["original_max_position_embeddings"] = s.original_length
    return entry if s.attention_factor is None else {**entry, "attention_factor": s.attention_factor}


SCALINGS: dict[str, tuple[Callable[[Json, Fields], RotaryScaling | None], Callable[[RotaryScaling], Json | None]]] = {
    "default": (lambda entry, c: None, lambda s: None),
    "linear": (_linear, _linear_back),
    "proportional": (_proportional, _proportional_back),
    "llama3": (_llama3, _llama3_back),
    "yarn": (_yarn, _yarn_back),
    "longrope": (_longrope, _longrope_back),
    "su": (_longrope, lambda s: None),  # Phi-3's first name for it
}
"""By rope type: a reader, which removes the fields it uses from the dict, and a writer, `None` for another scaling."""
