"""Rules: which mesh axes each logical axis is sharded over, in parameters, gradients, optimizer state, activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from jaxscale.config import register
from jaxscale.errors import LayoutError, near
from jaxscale.layout.axes import check_axis, check_mesh_axis
from jaxscale.other_names import fold

Kind = Literal["params", "grads", "opt_state", "activations"]
Target = str | tuple[str, ...] | None


class AxisMap(dict[str, tuple[str, ...]]):
    """Logical axis -> mesh axes, hashable because it is part of the key under which traces are cached."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    @classmethod
    def of(cls, mapping: Mapping[str, Target], where: str) -> AxisMap:
        """Check a mapping and write every value as a tuple; `where` is the mapping's name, for messages."""
        out = cls()
        for axis, target in mapping.items():
            check_axis(axis, where)
            mesh_axes = () if target is None else (target,) if isinstance(target, str) else tuple(target)
            for m in mesh_axes:
                check_mesh_axis(m, f"{where}['{axis}']")
            if len(set(mesh_axes)) != len(mesh_axes):
                raise LayoutError(f"{where}['{axis}'] names a mesh axis twice in {mesh_axes}; give each once")
            out[axis] = mesh_axes
        return out


@register
@dataclasses.dataclass(frozen=True)
class Rules:
    """Four maps from logical axes to mesh axes; an axis that a map does not name is replicated.

    A value is a mesh axis, a tuple of them (the first is outermost), or `None`. A mesh axis of size 1 shards nothing,
    so that one set of rules serves every mesh.

    Args:
      params: for stored parameters.
      grads: for accumulated gradients; `None` means as `params`.
      opt_state: for optimizer state that has the shape of a parameter; `None` means as `grads`.
      activations: for activations, and for weights while a layer uses them.

    Raises:
      LayoutError: an unknown logical or mesh axis.
    """

    params: Mapping[str, Target] = dataclasses.field(default_factory=dict)
    grads: Mapping[str, Target] | None = None
    opt_state: Mapping[str, Target] | None = None
    activations: Mapping[str, Target] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        grads = self.params if self.grads is None else self.grads
        opt_state = grads if self.opt_state is None else self.opt_state
        for name, m in (("params", self.params), ("grads", grads), ("opt_state", opt_state),
                        ("activations", self.activations)):  # fmt: skip
            object.__setattr__(self, name, AxisMap.of(m, f"Rules.{name}"))

    def for_generation(self) -> Rules:
        """Return these rules for generation: the KV cache is sharded along the sequence, the step's tokens are not."""
        whole = dict.fromkeys(("seq", "residual_seq", "expert_seq"))
        return dataclasses.replace(self, activations={**self.activations, **whole})

    def with_whole_vocabulary(self) -> Rules:
        """Return these rules with activations whose vocabulary pipeline stages do not shard (`Pipeline.vocabulary`)."""
        over = tuple(m for m in self.target("activations", "vocab") if m != "pipeline")
        return dataclasses.replace(self, activations={**self.activations, "vocab": over})

    def target(self, kind: Kind, axis: str) -> tuple[str, ...]:
        """Return the mesh axes that a logical axis is sharded over.

        Args:
          kind: which of the four maps to read.
          axis: the logical axis.
        """
        return getattr(self, kind).get(axis, ())


# A batch is sharded over every mesh axis along which a layer's computation is not sharded.
_BATCH: dict[str, Target] = {
    "batch": ("replica", "data", "fsdp", "expert"),
    "seq": "context",
    "residual_seq": "context",
    "expert_batch": ("replica", "data", "fsdp", "expert"),
    "expert_seq": "context",
    "cache_seq": "context",
    "pages": "context",
}
# Column- and row-parallel pairs of Megatron-LM (Shoeybi et al. 2019), and its vocabulary-parallel embedding and head.
_TENSOR: dict[str, Target] = {
    **dict.fromkeys(("heads", "kv_heads", "mlp", "expert_mlp"), "tensor"),
    "vocab": ("pipeline", "tensor"),
}
_EXPERT: dict[str, Target] = {"experts": "expert", "layers": "pipeline"}
# All stages share the work of the embedding and the output head, not only the first and the last stage.
_ENDS: dict[str, Target] = {"vocab": "pipeline"}
# ZeRO shards over every replica of the batch, along `embed` (in nearly every weight) or `norm` (in the others).
# `expert` is left out: devices along it hold different experts.
_WIDTHS = ("embed", "norm", "expert_embed", "latent_in")
_ALL: dict[str, Target] = dict.fromkeys(_WIDTHS, ("data", "fsdp"))
_FSDP: dict[str, Target] = {"embed": "fsdp", "expert_embed": "fsdp", "latent_in": "fsdp"}
# `fsdp` is outermost, so that only FSDP's shard crosses `data`.
_NESTED: dict[str, Target] = dict.fromkeys(_WIDTHS, ("fsdp", "data"))
_USED: dict[str, Target] = {**_BATCH, **_TENSOR, "experts": "expert"}
# Whole experts over the devices that shard attention's heads and sequence, with as many tokens on each (parallel
# folding, Liu et al. 2025).
_FOLDED: dict[str, Target] = {"experts": ("expert", "context", "tensor"), "expert_mlp": None}


def _replicated() -> Rules:
    return Rules(params={**_ENDS, "layers": "pipeline"}, activations={**_BATCH, **_ENDS})


def _zero1() -> Rules:
    rest = {**_TENSOR, **_EXPERT}
    return Rules(params=rest, grads={**rest, **_ALL}, activations=_USED)


def _hierarchical() -> Rules:
    rest = {**_TENSOR, **_EXPERT}
    return Rules(params={**rest, **_FSDP}, grads={**rest, **_NESTED}, activations=_USED)


def _three_level() -> Rules:
    state: dict[str, Target] = dict.fromkeys(_WIDTHS, ("fsdp", "data", "replica"))
    return dataclasses.replace(_hierarchical(), opt_state={**_TENSOR, **_EXPERT, **state})


def _fsdp() -> Rules:
    return Rules(params={**_FSDP, **_ENDS, **_EXPERT}, activations={**_BATCH, **_ENDS, "experts": "expert"})


def _tensor() -> Rules:
    return Rules(params={**_TENSOR, **_EXPERT}, activations=_USED)


def _fsdp_tensor() -> Rules:
    return Rules(params={**_FSDP, **_TENSOR, **_EXPERT}, activations=_USED)


def _fsdp_context() -> Rules:
    over: dict[str, Target] = dict.fromkeys(_FSDP, ("fsdp", "context"))
    return Rules(params={**over, **_TENSOR, **_EXPERT}, activations=_USED)


def _folded() -> Rules:
    rules = _fsdp_tensor()
    params = {**rules.params, **_FOLDED}
    return Rules(params=params, activations={**rules.activations, **_FOLDED, "expert_seq": ("context", "tensor")})


PRESETS: dict[str, Callable[[], Rules]] = {
    "replicated": _replicated,
    "zero1": _zero1,
    "zero2": _zero1,
    "hierarchical": _hierarchical,
    "three_level": _three_level,
    "fsdp": _fsdp,
    "tensor": _tensor,
    "fsdp_tensor": _fsdp_tensor,
    "fsdp_context": _fsdp_context,
    "folded": _folded,
}
"""Rules by name.

- `replicated`: data parallelism.
- `zero1`, `zero2`: optimizer state and gradients are sharded over all replicas (Rajbhandari et al. 2020). Both are one
  set of rules: each gradient is reduce-scattered as soon as it is computed, which takes less memory and communication
  than ZeRO-1's whole gradients. With pipeline stages, replicas hold whole gradients and reduce-scatter them once a
  step. Both combine with `tensor`, `expert` and `pipeline`.
- `hierarchical`: parameters over `fsdp` (the fast axis), gradients and optimizer state over `fsdp` and `data`, so that
  only the update crosses the slow axis (Xu et al. 2025, low-bandwidth partitioning).
- `three_level`: `hierarchical`, with optimizer state over `replica`, too: parameters, gradients and states are each
  sharded over one more axis than the ones before. Not for algorithms whose replicas differ.
- `fsdp`: parameters, gradients and optimizer state over `fsdp` (ZeRO-3; hybrid when `data` > 1).
- `tensor`: Megatron-LM.
- `fsdp_tensor`, the default: `fsdp` and `tensor`; a mesh axis of size 1 changes nothing.
- `fsdp_context`: `fsdp_tensor`, with all that is sharded over `fsdp` over `context`, too, so that devices that share a
  row share the state as well: with "context=32" each has a thirty-second of it.
- `folded`: `fsdp_tensor`, with experts over `expert`, `context` and `tensor` together, which attention uses for its
  sequence and heads."""


def preset(name: str, *, sequence_sharded: bool = False) -> Rules:
    """Return the rules called `name`.

    Args:
      name: a key of `PRESETS`.
      sequence_sharded: also shard the residual stream between blocks along its sequence over `tensor`
        (Korthikanti et al. 2022), which turns each all-reduce into a reduce-scatter and an all-gather.

    Raises:
      LayoutError: no such preset.
    """
    if name not in PRESETS:
        if fold(name) in ("sp", "sequence"):
            raise LayoutError(
                f"there is no rule preset '{name}'; use another preset with Layout.sequence_sharded = True"
            )
        raise LayoutError(f"there is no rule preset '{name}'{near(name, PRESETS)}")
    rules = PRESETS[name]()
    maps: dict[str, Mapping[str, Target]] = {f.name: getattr(rules, f.name) for f in dataclasses.fields(rules)}
    rules = Rules(**{kind: {**targets, "replicas": "replica"} for kind, targets in maps.items()})
    if sequence_sharded:
        rules = dataclasses.replace(rules, activations={**rules.activations, "residual_seq": ("context", "tensor")})
    return rules


@register
def shared_rows(rules: str = "fsdp_tensor") -> Rules:
    """Return a preset's rules without sharding rows over the mesh axis `replica`: all replicas get the same rows.

    Args:
      rules: the preset's name.

    Raises:
      LayoutError: no such preset.
    """
    base = preset(rules)
    rows = {axis: [m for m in base.target("activations", axis) if m != "replica"] for axis in ("batch", "expert_batch")}
    return dataclasses.replace(base, activations={**base.activations, **{a: tuple(m) for a, m in rows.items()}})


EXPERTS: dict[str, dict[str, Target]] = {
    "sent": {},
    "split": {"experts": None, "expert_mlp": ("expert", "tensor"), "expert_batch": ("replica", "data", "fsdp")},
    "gathered": {"experts": None},
}
"""Ways to compute experts that are stored over `expert`, as changes to a preset's rules for activations."""


@register
def experts_as(way: str = "gathered", rules: str = "fsdp_tensor") -> Rules:
    """Return a preset's rules with experts computed another way, and all parameters where the preset has them.

    A run or a checkpoint goes from one to another without moving a weight (Tutel, Hwang et al. 2023, arXiv:2206.03382);
    weights that a layer uses otherwise than they are stored are resharded while it uses them.

    Args:
      way: "sent": tokens are sent to the devices of their experts, as in the preset; "split": each device along
        `expert` computes a part of the hidden layer of every expert, for the tokens of all of them; "gathered": experts
        are gathered along `expert` for use, as FSDP gathers weights, and no token is sent. With the last two every
        device has as many rows, whatever the experts' loads.
      rules: the preset's name.

    Raises:
      LayoutError: no such way, no such preset, or a preset that shards experts by other axes than `expert`.
    """
    if way not in EXPERTS:
        raise LayoutError(f"experts_as.way = {way!r}: must be one of {', '.join(EXPERTS)}")
    base = preset(rules)
    for kind in ("params", "activations"):
        if base.target(kind, "experts") != ("expert",):
            raise LayoutError(
                f"experts_as(rules={rules!r}) needs rules that shard experts over 'expert' alone, such as 'fsdp_tensor'"
            )
    return dataclasses.replace(base, activations={**base.activations, **EXPERTS[way]})
