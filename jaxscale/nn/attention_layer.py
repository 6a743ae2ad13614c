"""Values of `Transformer.attention_layer`: they make a block's attention layer and define the widths of its heads."""

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
"""Arguments of `Attention` only; the `check` of other layers refuses those that would have no effect."""


class HeadDims(NamedTuple):
    """Widths of a head.

    Args:
      key: of queries and keys.
      value: of values.
      rotary: of the part of queries and keys that rotary positions rotate.
    """

    key: int
    value: int
    rotary: int


class Width(NamedTuple):
    """An output dimension of a matrix product.

    Args:
      axis: its logical axis.
      size: its size.
      columns: matrix columns per index of it, such as the width of a head.
    """

    axis: str
    size: int
    columns: int = 1


class Projection(NamedTuple):
    """A matrix product (tokens x inner) @ (inner x outer) that computes queries, keys or values.

    Args:
      inner: the summed dimension.
      parts: the output dimensions.
    """

    inner: int
    parts: tuple[Width, ...]

    @property
    def outer(self) -> int:
        """The number of output columns."""
        return sum(p.size * p.columns for p in self.parts)

    @property
    def axis(self) -> str:
        """The logical axis of the first part."""
        return self.parts[0].axis


class AttentionLayer(Mixer, Protocol):
    """A mixer that is attention; as `Transformer.attention_layer` it defines the widths of a model's heads.

    Attributes:
      whole: without a window, a query reads all keys that the mask leaves.
    """

    softmax: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    widens: ClassVar[bool] = True
    windowed: ClassVar[bool] = True
    any_order: ClassVar[bool] = True

    def dims(self, head_dim: int) -> HeadDims:
        """Return the widths of a head.

        Args:
          head_dim: the model's `head_dim`.
        """
        ...

    def score_scale(self, head_dim: int, rotary: Rotary | None) -> float:
        """Return the default factor on the attention scores.

        Args:
          head_dim: the model's `head_dim`.
          rotary: the layer's rotary embedding, or `None`.
        """
        ...

    def projections(self, width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
        """Return the matrix products before the scores.

        Args:
          width: width of the residual stream.
          heads: number of query heads.
          kv_heads: number of key heads.
          head_dim: the model's `head_dim`.
        """
        ...

    def cache_width(self, kv_heads: int, head_dim: int) -> int:
        """Return how many numbers a KV cache stores per token and layer.

        Args:
          kv_heads: number of key heads.
          head_dim: the model's `head_dim`.
        """
        ...

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """Return the FLOPs of a layer's matrix products; of scores and values, only those of visible pairs of tokens.

        Args:
          config: the `TransformerConfig`.
          batch: number of rows.
          seq: tokens per row.
          window: the block's window, or `None`.
        """
        z = config.sizes
        w = min(window or seq, seq)
        pairs = w * (w + 1) // 2 + (seq - w) * w
        pairs = pairs if config.causal else 2 * pairs - seq  # as many pairs after a token as before it
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

    drops: ClassVar[bool] = True
    gives: ClassVar[tuple[str, ...]] = ("keys",)
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

    def cache_width(self, kv_heads: int, head_dim: int) -> int:
        """See `AttentionLayer`."""
        return 2 * kv_heads * head_dim

    def check(self, config: Any) -> None:
        """See `AttentionLayer`."""
        z = config.sizes
        rotates = isinstance(config.positions, Rotary) or config.local_positions  # pairs, so a head's width is even
        if config.heads and not config.head_dim and z.width % config.heads:
            fits = [d for d in range(1, config.heads + 1) if z.width % d == 0 and not (rotates and z.width // d % 2)]
            nearest = f"the nearest that does is {max(fits)}, or " if fits else ""
            raise ConfigError(
                f"Transformer.heads = {config.heads} does not divide width = {z.width}; {nearest}set head_dim"
            )
        _check_heads(config)

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        return Attention(width, heads, kv_heads, head_dim, **options)


@register
@dataclasses.dataclass(frozen=True)
class MultiHeadLatent(AttentionLayer):
    """Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): all heads' keys and values from one narrow vector.

    The KV cache stores that vector and one rotary key for all heads (`jaxscale.nn.LatentAttention`).

    Args:
      kv_rank: width of the vector that keys and values are projected from.
      q_rank: width of the vector that queries are projected from; `None` projects them from the residual stream.
      plain_dim: width of the part of queries and keys that is not rotated.
      rotary_dim: width of the rotated part; all heads share that part of the key.
      value_dim: width of a value.
      norm_eps: epsilon of the norms of the two vectors.

    Raises:
      ConfigError: a width below 1, or an odd `rotary_dim`.
    """

    drops: ClassVar[bool] = True
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
                raise ConfigError(f"{type(self).__name__}.{name} = {value!r}: must be a whole number of at least 1")
        if self.rotary_dim % 2:
            raise ConfigError(
                f"{type(self).__name__}.rotary_dim = {self.rotary_dim}: rotary positions rotate pairs of dimensions; "
                "make it even"
            )

    def dims(self, head_dim: int) -> HeadDims:
        """See `AttentionLayer`."""
        return HeadDims(self.plain_dim + self.rotary_dim, self.value_dim, self.rotary_dim)

    def score_scale(self, head_dim: int, rotary: Rotary | None) -> float:
        """See `AttentionLayer`: `1 / sqrt(plain_dim + rotary_dim)`, times `YarnScaling.score_factor`."""
        scaling = None if rotary is None else rotary.scaling
        factor = scaling.score_factor if isinstance(scaling, ScalesScores) else 1.0
        return (self.plain_dim + self.rotary_dim) ** -0.5 * factor

    def projections(self, width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Projection, ...]:
        """See `AttentionLayer`."""
        query_products = []
        if self.q_rank is not None:
            query_products = [Projection(width, (Width("latent", self.q_rank),))]
        return (
            *query_products,
            Projection(self.q_rank or width, (Width("heads", heads, self.plain_dim + self.rotary_dim),)),
            Projection(width, (Width("latent", self.kv_rank + self.rotary_dim),)),
            Projection(self.kv_rank, (Width("heads", heads, self.plain_dim + self.value_dim),)),
        )

    def cache_width(self, kv_heads: int, head_dim: int) -> int:
        """See `AttentionLayer`."""
        return self.kv_rank + self.rotary_dim

    def check(self, config: Any) -> None:
        """See `AttentionLayer`."""
        if config.attention_layer != self:
            raise ConfigError(
                f"Block.mixer = {type(self).__name__}(...) has other head widths than Transformer.attention_layer, "
                "which decides the widths of rotary tables; set Transformer.attention_layer to the same value"
            )
        _check_heads(config)
        for name, why in (
            ("head_dim", "its heads are plain_dim + rotary_dim wide"),
            ("kv_heads", "each of its heads has its own keys"),
            ("qk_norm", "it normalises the narrow vectors"),
            ("qkv_bias", "it has no biases"),
            ("bias", "it has no biases"),
        ):
            if getattr(config, name):
                raise ConfigError(
                    f"Transformer.{name} = {getattr(config, name)!r} has no effect with {type(self).__name__}: {why}; "
                    "remove it"
                )
        if "attention" in config.overlap:
            raise ConfigError(
                f"Transformer.overlap names 'attention', and {type(self).__name__}'s first products are not sharded "
                "over tensor, so that there is nothing to overlap; remove it"
            )

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> nnx.Module:
        """See `AttentionLayer`."""
        options = {name: value for name, value in options.items() if name not in _OF_MULTI_HEAD}
        return LatentAttention(width, heads, self, **options)


def _check_heads(config: Any) -> None:
    """Check a model's numbers and widths of heads."""
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
        raise ConfigError(
            f"Transformer.head_dim = {z.head_dim}: rotary positions rotate pairs of dimensions; make it even"
        )
