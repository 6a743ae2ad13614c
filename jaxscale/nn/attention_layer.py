"""What a `Transformer` takes as `attention_layer`: it makes a block's attention, and says how wide its heads are."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol

from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.nn.attention import Attention
from jaxscale.nn.latent import LatentAttention
from jaxscale.nn.mixer import Mixer
from jaxscale.nn.rotary import Rotary, ScalesScores

_OF_MULTI_HEAD = ("qk_norm", "bias", "out_bias", "norm_eps", "overlap")
"""What `Attention` is told and others need not take, whose `check` refuses what would have no effect."""


class HeadDims(NamedTuple):
    """Widths of a head: of queries and keys, of values, and of what rotary positions turn."""

    key: int
    value: int
    rotary: int


class Width(NamedTuple):
    """A width that a product has: a dimension of this logical axis and size, with so many columns for each of it."""

    axis: str
    size: int
    columns: int = 1


class Projection(NamedTuple):
    """A product (tokens x inner) @ (inner x outer) on the way to queries, keys or values, and the outer's parts."""

    inner: int
    parts: tuple[Width, ...]

    @property
    def outer(self) -> int:
        """Columns."""
        return sum(p.size * p.columns for p in self.parts)

    @property
    def axis(self) -> str:
        """The logical axis of the first part."""
        return self.parts[0].axis


class AttentionLayer(Mixer, Protocol):
    """A mixer that attends: `Transformer.attention_layer`, by which a model's heads have their widths."""

    widens: ClassVar[bool] = True
    windowed: ClassVar[bool] = True
    any_order: ClassVar[bool] = True

    def dims(self, head_dim: int) -> HeadDims:
        """Of one of its heads, in a model whose own is `head_dim`."""
        ...

    def score_scale(self, head_dim: int, rotary: Rotary | None) -> float:
        """The factor on scores, where a model sets none."""
        ...

    def projections(self, width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
        """Its products with weights before the scores."""
        ...

    def kept_width(self, kv_heads: int, head_dim: int) -> int:
        """How many numbers a cache keeps of a token."""
        ...

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`: of scores and values, those pairs of tokens count of which one sees the other."""
        z = config.sizes
        w = min(window or seq, seq)
        pairs = w * (w + 1) // 2 + (seq - w) * w
        pairs = pairs if config.causal else 2 * pairs - seq  # as many behind a token as before it, and itself
        projections = self.projections(z.width, z.heads, z.kv_heads, z.head_dim)
        key, value, _ = self.dims(z.head_dim)
        return {
            "qkv": 2 * batch * seq * sum(p.inner * p.outer for p in projections),
            "scores": 2 * batch * pairs * z.heads * key,
            "attn_out": 2 * batch * pairs * z.heads * value,
            "residual_mid": 2 * batch * seq * z.width * z.heads * value,
        }


@register
@dataclasses.dataclass(frozen=True)
class MultiHead(AttentionLayer):
    """Multi-head, grouped-query or multi-query attention: `jaxscale.nn.Attention`."""

    in_formulas: ClassVar[bool] = True

    def dims(self, head_dim: int) -> HeadDims:
        """See `AttentionLayer`."""
        return HeadDims(head_dim, head_dim, head_dim)

    def score_scale(self, head_dim: int, rotary: Rotary | None) -> float:
        """See `AttentionLayer`."""
        return head_dim**-0.5

    def projections(self, width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
        """See `AttentionLayer`."""
        return (Projection(width, (Width("heads", heads, head_dim), Width("kv_heads", kv_heads, 2 * head_dim))),)

    def kept_width(self, kv_heads: int, head_dim: int) -> int:
        """See `AttentionLayer`."""
        return 2 * kv_heads * head_dim

    def check(self, config: Any) -> None:
        """See `AttentionLayer`."""
        z = config.sizes
        turned = isinstance(config.positions, Rotary) or config.local_positions  # pairs, so a head's width is even
        if config.heads and not config.head_dim and z.width % config.heads:
            fits = [d for d in range(1, config.heads + 1) if z.width % d == 0 and not (turned and z.width // d % 2)]
            nearest = f"the nearest that does is {max(fits)}, or " if fits else ""
            raise ConfigError(
                f"Transformer.heads = {config.heads} does not divide width = {z.width}; {nearest}set head_dim"
            )
        _check_heads(config)

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **told: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        return Attention(width, heads, kv_heads, head_dim, **told)


@register
@dataclasses.dataclass(frozen=True)
class MultiHeadLatent(AttentionLayer):
    """Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): keys and values of all heads from one narrow vector.

    A cache keeps that vector and one rotary key for all heads (`jaxscale.nn.LatentAttention`).

    Args:
      kv_rank: width of the vector that keys and values are made of.
      q_rank: of the one that queries are made of; `None` makes them of the residual stream.
      plain_dim: width of the part of queries and keys that is not turned.
      rotary_dim: of the part that is, which all heads' keys have in common.
      value_dim: width of a value.
      norm_eps: of the norms of those vectors.

    Raises:
      ConfigError: a width below 1, or an odd `rotary_dim`.
    """

    in_formulas: ClassVar[bool] = True
    kv_rank: int = 512
    q_rank: int | None = None
    plain_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    norm_eps: float = 1e-6

    widens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("kv_rank", "q_rank", "plain_dim", "rotary_dim", "value_dim"):
            value = getattr(self, name)
            if (value is not None or name != "q_rank") and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"MultiHeadLatent.{name} = {value!r}: must be a whole number of at least 1")
        if self.rotary_dim % 2:
            raise ConfigError(
                f"MultiHeadLatent.rotary_dim = {self.rotary_dim}: rotary positions turn pairs, so make it even"
            )

    def dims(self, head_dim: int) -> HeadDims:
        """See `AttentionLayer`."""
        return HeadDims(self.plain_dim + self.rotary_dim, self.value_dim, self.rotary_dim)

    def score_scale(self, head_dim: int, rotary: Rotary | None) -> float:
        """See `AttentionLayer`: one over the root of a query's width, times `YarnScaling.score_factor`."""
        scaling = None if rotary is None else rotary.scaling
        factor = scaling.score_factor if isinstance(scaling, ScalesScores) else 1.0
        return (self.plain_dim + self.rotary_dim) ** -0.5 * factor

    def projections(self, width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
        """See `AttentionLayer`."""
        found = []
        if self.q_rank is not None:
            found = [Projection(width, (Width("latent", self.q_rank),))]
        return (
            *found,
            Projection(self.q_rank or width, (Width("heads", heads, self.plain_dim + self.rotary_dim),)),
            Projection(width, (Width("latent", self.kv_rank + self.rotary_dim),)),
            Projection(self.kv_rank, (Width("heads", heads, self.plain_dim + self.value_dim),)),
        )

    def kept_width(self, kv_heads: int, head_dim: int) -> int:
        """See `AttentionLayer`."""
        return self.kv_rank + self.rotary_dim

    def check(self, config: Any) -> None:
        """See `AttentionLayer`."""
        if config.attention_layer != self:
            raise ConfigError(
                "Block.mixer = MultiHeadLatent(...) has widths of its own, and rotary tables are made for those of "
                "Transformer.attention_layer; set that to the same one"
            )
        _check_heads(config)
        for name, why in (
            ("head_dim", "its heads are plain_dim + rotary_dim wide"),
            ("kv_heads", "each of its heads has keys of its own"),
            ("qk_norm", "what it normalises are the narrow vectors"),
            ("qkv_bias", "it has no biases"),
            ("bias", "it has no biases"),
        ):
            if getattr(config, name):
                raise ConfigError(
                    f"Transformer.{name} = {getattr(config, name)!r} has no effect with MultiHeadLatent: {why}; "
                    "leave it out"
                )
        if "attention" in config.overlap:
            raise ConfigError(
                "Transformer.overlap names 'attention', and MultiHeadLatent's first products are not cut by tensor, so "
                "that there is nothing to overlap; take it out"
            )

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **told: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        taken = {name: value for name, value in told.items() if name not in _OF_MULTI_HEAD}
        return LatentAttention(width, heads, self, **taken)


def _check_heads(config: Any) -> None:
    """That a model's heads go together."""
    z = config.sizes
    if z.head_dim < 1:
        raise ConfigError(
            f"Transformer.heads = {z.heads} is more than width = {z.width}; use at most that or set head_dim"
        )
    if z.heads % z.kv_heads:
        fit = max(d for d in range(1, z.kv_heads + 1) if z.heads % d == 0)
        raise ConfigError(
            f"Transformer.kv_heads = {z.kv_heads} does not divide heads = {z.heads}; the nearest that does is {fit}"
        )
    if z.rotary_dim % 2 and (isinstance(config.positions, Rotary) or config.local_positions):
        raise ConfigError(f"Transformer.head_dim = {z.head_dim}: rotary positions turn pairs, so make it even")
