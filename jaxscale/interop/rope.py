"""Rotary positions as config.json says them, both ways: `rope_theta` with `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxscale.errors import CheckpointError, ConfigError, near
from jaxscale.interop.fields import Fields, is_number, short
from jaxscale.nn import LinearScaling, Llama3Scaling, LongRopeScaling, Rotary, YarnScaling
from jaxscale.nn.rotary import RotaryScaling

Said = dict[str, Any]


def read_rotary(c: Fields, theta: float = 10000.0, *, phi3: bool = False) -> Rotary:
    """The rotary positions of a config.json.

    Args:
      c: its fields.
      theta: what counts where it does not say.
      phi3: it may turn a part of each head, or go by LongRoPE, which others read in other ways.

    Raises:
      CheckpointError: a kind that is not known, or said in two ways that differ.
    """
    said = _rope_said(c)
    base = _number(said, "rope_theta", c) or c.number("rope_theta", theta)
    if not phi3:
        scaling = read_scaling(said, c)
        if isinstance(scaling, LongRopeScaling):
            raise CheckpointError(f"{c.what} has the rope type 'longrope', which is read of Phi-3 alone")
        return Rotary(base, scaling)
    outside = c.number("partial_rotary_factor", 1.0)
    turned = _number(said, "partial_rotary_factor", c) or outside
    return Rotary(base, read_scaling(said, c), turned)


def _rope_said(c: Fields) -> Said:
    """What `rope_parameters` or, as older files call it, `rope_scaling` says."""
    new, old = (c.get(name, None) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, said in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(said, dict):
            raise CheckpointError(f"{c.what} has {name} = {said!r}, which is no object")
    beside = {name: c.get(name, None) for name in ("rope_theta", "partial_rotary_factor")}
    if new and old and _plain({**beside, **new}) != _plain({**beside, **old}):
        raise CheckpointError(f"{c.what} has rope_parameters and rope_scaling, which say different things; leave one")
    return dict(new or old)


def _plain(said: Said) -> Said:
    kind = said.get("rope_type") or said.get("type") or "default"
    return {**{k: v for k, v in said.items() if k != "type" and v is not None}, "rope_type": kind}


def _number(said: Said, name: str, c: Fields) -> float | None:
    value = said.pop(name, None)
    return None if value is None else Fields({name: value}, c.what).number(name)


def read_scaling(said: Said, c: Fields) -> RotaryScaling | None:
    """The scaling of a `rope_scaling`, without `rope_theta`.

    Raises:
      CheckpointError: a kind, or a field of it, that is not known.
    """
    said = dict(said)
    kind = said.pop("rope_type", None) or said.get("type") or "default"
    said.pop("type", None)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(f"{c.what} has the rope type '{short(kind)}'{near(short(kind), SCALINGS)}")
    for name, value in said.items():
        several = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(x, bool) or (is_number(x) and x >= 0) for x in several):
            raise CheckpointError(
                f"{c.what} has {name} = {short(value)} in its rope_scaling, which is no number of 0 or more"
            )
    try:
        scaling = SCALINGS[kind][0](said, c)
    except KeyError as e:
        raise CheckpointError(f"{c.what} has no {e} in its rope_scaling, which a '{kind}' one needs") from None
    except ConfigError:
        raise  # says what is wrong
    except (TypeError, ValueError, ArithmeticError) as e:
        raise CheckpointError(f"{c.what} has a '{kind}' rope_scaling that cannot be read: {e}") from None
    left = {k: v for k, v in said.items() if v is not None}
    if left:
        raise CheckpointError(f"{c.what} has {next(iter(left))} in its rope_scaling, which a '{kind}' one does not use")
    return scaling


def rotary_json(rotary: Rotary) -> Said:
    """What config.json says of rotary positions: `rope_theta` and `rope_scaling`, which every version reads.

    Raises:
      CheckpointError: a scaling that it has no word for.
    """
    out: Said = {"rope_theta": rotary.theta}
    if rotary.fraction != 1:
        out["partial_rotary_factor"] = rotary.fraction
    if rotary.scaling is None:
        return out
    for kind, (_, back) in SCALINGS.items():
        said = back(rotary.scaling)
        if said is not None:
            return {**out, "rope_scaling": {"rope_type": kind, **said}}
    raise CheckpointError(
        f"config.json has no word for {rotary.scaling!r}; its rope types are {', '.join(sorted(SCALINGS))}"
    )


def _linear(said: Said, c: Fields) -> RotaryScaling:
    return LinearScaling(float(said.pop("factor")))


def _linear_back(s: RotaryScaling) -> Said | None:
    return {"factor": s.factor} if type(s) is LinearScaling else None


def _llama3(said: Said, c: Fields) -> RotaryScaling:
    return Llama3Scaling(
        float(said.pop("factor")),
        float(said.pop("low_freq_factor")),
        float(said.pop("high_freq_factor")),
        int(_original_length(said, c) or c.get("max_position_embeddings")),
    )


def _original_length(said: Said, c: Fields) -> int | None:
    """That beside the scaling goes before the one in it, as in transformers."""
    inside = said.pop("original_max_position_embeddings", None)
    return c.get("original_max_position_embeddings", inside)


def _llama3_back(s: RotaryScaling) -> Said | None:
    if type(s) is not Llama3Scaling:
        return None
    return {
        "factor": s.factor,
        "low_freq_factor": s.low_freq_factor,
        "high_freq_factor": s.high_freq_factor,
        "original_max_position_embeddings": s.original_length,
    }


def _yarn(said: Said, c: Fields) -> RotaryScaling:
    length = _original_length(said, c) or c.get("max_position_embeddings")
    return YarnScaling(
        float(said.pop("factor")),
        float(said.pop("beta_fast", None) or 32.0),
        float(said.pop("beta_slow", None) or 1.0),
        int(length),
        **_mscale(said, c),
    )


def _mscale(said: Said, c: Fields) -> dict[str, float]:
    """DeepSeek's; one alone has no effect on cosine and sine."""
    one, all_dim = (float(said.pop(name, None) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if all_dim and not one:
        raise CheckpointError(f"{c.what} has mscale_all_dim in its rope_scaling, and no mscale; it takes both or none")
    return {"mscale": one, "mscale_all_dim": all_dim} if all_dim else {}


def _yarn_back(s: RotaryScaling) -> Said | None:
    if type(s) is not YarnScaling:
        return None
    return {
        "factor": s.factor,
        "beta_fast": s.beta_fast,
        "beta_slow": s.beta_slow,
        "original_max_position_embeddings": s.original_length,
        **({"mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim} if s.mscale_all_dim else {}),
    }


def _longrope(said: Said, c: Fields) -> RotaryScaling:
    said.pop("original_max_position_embeddings", None)  # transformers goes by the one beside the scaling alone
    length = c.size("original_max_position_embeddings", 4096)
    factor, attention = said.pop("factor", None), said.pop("attention_factor", None)
    return LongRopeScaling(
        tuple(said.pop("short_factor")),
        tuple(said.pop("long_factor")),
        int(length),
        float(factor or c.size("max_position_embeddings") / length),
        None if attention is None else float(attention),
    )


def _longrope_back(s: RotaryScaling) -> Said | None:
    if type(s) is not LongRopeScaling:
        return None
    said = {"short_factor": list(s.short), "long_factor": list(s.long), "factor": s.factor}
    said["original_max_position_embeddings"] = s.original_length
    return said if s.attention_factor is None else {**said, "attention_factor": s.attention_factor}


SCALINGS: dict[str, tuple[Callable[[Said, Fields], RotaryScaling | None], Callable[[RotaryScaling], Said | None]]] = {
    "default": (lambda said, c: None, lambda s: None),
    "linear": (_linear, _linear_back),
    "llama3": (_llama3, _llama3_back),
    "yarn": (_yarn, _yarn_back),
    "longrope": (_longrope, _longrope_back),
    "su": (_longrope, lambda s: None),  # what Phi-3 called it first
}
"""By name: a reader, which takes what it knows out of the dict, and the way back, `None` of another's scaling."""
