"""The decoder-only transformer, every part of it a value."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.layout import TensorInfo, abstract, constrain
from jaxscale.nn import (
    Attention,
    AttentionKernel,
    Block,
    Context,
    Embedding,
    FeedForward,
    MemoryPolicy,
    Part,
    RMSNorm,
    Rotary,
    Run,
    SwiGLU,
    dot_product_attention,
    head_logits,
)


@dataclasses.dataclass(frozen=True)
class Learned:
    """Learned absolute positions: a table of `length` vectors added to the token embedding (GPT-2)."""

    length: int = 1024


register(Learned, name="LearnedPositions")


@register(name="Transformer")
@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer (`jaxscale.models.Transformer.Config`; `Transformer` in gin).

    `depth` alone gives a sensible small model: width 64 per layer, heads of 64 (32 below width 256), a feed-forward
    of 8/3 (gated) or 4 times the width. Every other size can be set.

    Args:
      depth: number of layers.
      vocab: number of token ids.
      width, heads, kv_heads, head_dim, hidden: sizes; `None` follows from `depth` as above, `kv_heads` from `heads`.
      norm: `RMSNorm`, `LayerNorm` or another of that signature; `norm_eps` goes with it.
      mlp: `SwiGLU`, `GeGLU`, `GELU` or another of that signature.
      attention: an attention kernel (see `jaxscale.nn.AttentionKernel`).
      positions: `Rotary(...)`, `Learned(length)` or `None`.
      windows: attention windows of consecutive layers, repeated over the depth: `(1024, 1024, None)` is two local
        layers for each global one.
      local_positions: positions of the layers that have a window, when they differ (Gemma 3).
      qk_norm: RMS-normalise queries and keys.
      attention_softcap, logit_softcap: soft caps on attention scores and output logits (Gemma 2).
      attention_scale: factor on the scores, `1 / sqrt(head_dim)` by default.
      qkv_bias, bias: biases on the query, key and value projections, and on all the others.
      tied: the output head is the token embedding.
      parallel: attention and feed-forward side by side, of one norm.
      post_norm: norms after each sub-layer as well (Gemma 2).
      embedding: `Embedding`, or `StableEmbedding` for training with 8-bit optimizer states.
      embed_scale: factor on token embeddings (Gemma: sqrt of the width).
      dropout: probability on each sub-layer's output while training.
      dtype, param_dtype: of the arithmetic and of the parameters; norms, softmax and loss are float32 regardless.
      memory: what becomes of activations before the backward pass: a `MemoryPolicy`, or a key of
        `jaxscale.nn.POLICIES`.
      overlap: sub-layers ("attention", "mlp") whose products run beside the collectives of a sequence that `tensor`
        cuts (`Layout(..., sequence_sharded=True)`), piece by piece, instead of before and after them.
      stack: `Run`, or `ReversibleRun`, whose activations do not grow with depth.
      scan: apply each run of layers by one scan (compile time does not grow with depth).

    Raises:
      ConfigError: sizes that do not go together.
    """

    depth: int = 4
    vocab: int = 256
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    norm: Callable[..., nnx.Module] = RMSNorm
    norm_eps: float = 1e-6
    mlp: Callable[..., FeedForward] = SwiGLU
    attention: AttentionKernel = dot_product_attention
    positions: Rotary | Learned | None = Rotary()
    windows: tuple[int | None, ...] = (None,)
    local_positions: Rotary | None = None
    qk_norm: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_scale: float | None = None
    qkv_bias: bool = False
    bias: bool = False
    tied: bool = False
    parallel: bool = False
    post_norm: bool = False
    embedding: Callable[..., Embedding] = Embedding
    embed_scale: float | None = None
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    memory: str | MemoryPolicy = "none"
    overlap: tuple[str, ...] = ()
    stack: type[Run] = Run
    scan: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))
        object.__setattr__(self, "overlap", tuple(self.overlap))
        _check(self)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """All sizes, those left to `depth` worked out."""
        width = self.width or max(64, 64 * self.depth)
        head_dim = self.head_dim or (width // self.heads if self.heads else 64 if width >= 256 else 32)
        heads = self.heads or max(1, width // head_dim)
        hidden = self.hidden or (math.ceil(width * 8 / 3 / 64) * 64 if self._gated else 4 * width)
        return Sizes(width, heads, self.kv_heads or heads, head_dim, hidden)

    @property
    def runs(self) -> tuple[tuple[tuple[int | None, ...], int], ...]:
        """Runs of layers as (windows of one group, repeats); the remainder of a pattern is a run of its own."""
        period = len(self.windows)
        whole, rest = divmod(self.depth, period)
        runs = [(self.windows, whole)] if whole else []
        return (*runs, (self.windows[:rest], 1)) if rest else tuple(runs)

    def layer_windows(self) -> list[int | None]:
        """The window of every layer."""
        return [self.windows[i % len(self.windows)] for i in range(self.depth)]

    def make(self, rngs: nnx.Rngs) -> Transformer:
        """The model itself."""
        return Transformer(self, rngs=rngs)

    def param_count(self) -> int:
        """Number of parameters, tied ones once; counted from the module, which is described but not made."""
        _, infos = abstract(lambda: self.make(nnx.Rngs(0)))
        return sum(i.size for i in jax.tree.leaves(infos))

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int:
        """Matrix-multiplication FLOPs of one pass over `batch` rows of `seq` tokens.

        A multiply-add is two. Attention counts the causal (and windowed) pairs only, not the square; a backward pass
        counts as two forward ones, recomputation not at all. Lookups, norms and softmax are left out.

        Args:
          training: forward and backward; else forward.
        """
        return sum(self.products(batch, seq).values()) * (3 if training else 1)

    def products(self, batch: int, seq: int) -> dict[str, int]:
        """The forward part of `flops`, by what is made, over all layers."""
        z = self.sizes
        pairs = 0
        for window in self.layer_windows():
            w = min(window or seq, seq)
            pairs += w * (w + 1) // 2 + (seq - w) * w
        attend = 2 * batch * pairs * z.heads * z.head_dim
        tokens = 2 * batch * seq * self.depth
        return {
            "qkv": tokens * z.width * z.head_dim * (z.heads + 2 * z.kv_heads),
            "scores": attend,
            "attn_out": attend,
            "residual_mid": tokens * z.width * z.head_dim * z.heads,
            "mlp_up": tokens * z.width * z.hidden * (2 if self._gated else 1),
            "mlp_down": tokens * z.width * z.hidden,
            "logits": 2 * batch * seq * z.width * self.vocab,
        }

    def activations(self, batch: int, seq: int) -> dict[str, tuple[TensorInfo, ...]]:
        """What one layer leaves for its backward pass, by the tensors that memory policies name.

        "scores" has no such name: attention's weights, which only `dot_product_attention` holds.
        """
        z = self.sizes

        def tensors(name: str, sizes: dict[str, int], count: int = 1, dtype: str = self.dtype) -> tuple[Any, ...]:
            axes, shape = ("batch", *sizes), (batch, *sizes.values())
            return (TensorInfo(name, shape, jnp.dtype(dtype), axes),) * count

        stream, hidden = {"residual_seq": seq, "embed": z.width}, {"seq": seq, "mlp": z.hidden}
        heads = {"seq": seq, "heads": z.heads, "head_dim": z.head_dim}
        kv = {"seq": seq, "kv_heads": z.kv_heads, "head_dim": z.head_dim}
        dense = self.attention is dot_product_attention
        return {
            "residual": tensors("residual", stream),
            "residual_mid": tensors("residual_mid", stream, 0 if self.parallel else 1),
            "norm": tensors("norm", stream, (1 if self.parallel else 2) + 2 * self.post_norm),
            "qkv": tensors("q", heads) + tensors("kv", kv, 2),
            "scores": tensors("scores", {"heads": z.heads, "seq": seq, "kv_seq": seq}, 1 if dense else 0),
            "attn_out": tensors("attn_out", heads),
            "lse": tensors("lse", {"seq": seq, "heads": z.heads}, 0 if dense else 1, "float32"),
            "mlp_up": tensors("mlp_up", hidden, 2 if self._gated else 1),
            "mlp_hidden": tensors("mlp_hidden", hidden),
        }

    @property
    def _gated(self) -> bool:
        return getattr(self.mlp, "gated", False)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A transformer's sizes: residual width, heads, key/value heads, head width, feed-forward width."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


def _check(c: TransformerConfig) -> None:
    for name in ("depth", "vocab", "width", "heads", "kv_heads", "head_dim", "hidden"):
        value = getattr(c, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"Transformer.{name} = {value!r}: must be a whole number of at least 1")
    types = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    overlap: dict[str, Any] = {"overlap": True} if "mlp" in c.overlap else {}
    _check_call("mlp", c.mlp, "width, hidden", bias=c.bias, out_scale=1.0, rngs=None, **overlap, **types)
    _check_call("norm", c.norm, "width", eps=c.norm_eps, **types)
    z = c.sizes
    if c.heads and not c.head_dim and z.width % c.heads:
        fit = max(d for d in range(1, c.heads + 1) if z.width % d == 0)
        raise ConfigError(
            f"Transformer.heads = {c.heads} does not divide width = {z.width}; the nearest that does is {fit}, or set "
            "head_dim"
        )
    if z.head_dim < 1:
        raise ConfigError(
            f"Transformer.heads = {z.heads} is more than width = {z.width}; use at most that or set head_dim"
        )
    if z.heads % z.kv_heads:
        fit = max(d for d in range(1, z.kv_heads + 1) if z.heads % d == 0)
        raise ConfigError(
            f"Transformer.kv_heads = {z.kv_heads} does not divide heads = {z.heads}; the nearest that does is {fit}"
        )
    if z.head_dim % 2 and (_rotary(c.positions) or c.local_positions):
        raise ConfigError(f"Transformer.head_dim = {z.head_dim}: rotary positions turn pairs, so make it even")
    MemoryPolicy.of(c.memory)
    for name in c.overlap:
        if name not in ("attention", "mlp"):
            raise ConfigError(f"Transformer.overlap names the sub-layer '{name}'{near(name, ('attention', 'mlp'))}")
    if not c.windows:
        raise ConfigError("Transformer.windows is empty; use (None,) for global attention everywhere")
    for w in c.windows:
        if w is not None and w < 1:
            raise ConfigError(f"Transformer.windows has {w}: a window counts the query's own position, so at least 1")
    if not 0.0 <= c.dropout < 1.0:
        raise ConfigError(f"Transformer.dropout = {c.dropout}: must be at least 0 and below 1")
    for name in ("dtype", "param_dtype"):
        if getattr(c, name) not in ("float32", "bfloat16"):
            raise ConfigError(
                f"Transformer.{name} = '{getattr(c, name)}' is not supported; use 'bfloat16' (which needs no loss "
                "scaling) or 'float32'"
            )


def _check_call(name: str, part: Callable[..., Any], sizes: str, **options: Any) -> None:
    """A part is told what the others are told; one that takes less says so here and not in a traceback."""
    try:
        inspect.signature(part).bind(*sizes.split(", "), **options)
    except TypeError as e:
        takes = f"({sizes}, *, {', '.join(options)})"
        raise ConfigError(f"Transformer.{name} = {part!r} must be callable as {takes}: {e}") from None


class Transformer(nnx.Module):
    """`embed`, runs of stacked blocks, and a head. The loss takes `hidden` and `head_weight`, never logits."""

    Config = TransformerConfig

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        z = config.sizes
        types: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype))
        # With sqrt(width) as a factor on the embedding, its initial values shrink to match.
        scale = 0.02 if config.embed_scale is None else 1 / config.embed_scale
        self.embed = config.embedding(config.vocab, z.width, scale=scale, rngs=rngs, **types)
        length = config.positions.length if isinstance(config.positions, Learned) else 0
        self.positions = Embedding(length, z.width, axis="positions", rngs=rngs, **types) if length else None
        runs, first = [], 0
        for windows, repeats in config.runs:
            make_group = functools.partial(_make_group, config, windows)
            runs.append(
                config.stack(
                    make_group, repeats, first=first, memory=MemoryPolicy.of(config.memory), scan=config.scan, rngs=rngs
                )
            )
            first += repeats * len(windows)
        self.runs = nnx.List(runs)
        self.norm = config.norm(z.width, eps=config.norm_eps, **types)
        head = functools.partial(Embedding, config.vocab, z.width, scale=z.width**-0.5, rngs=rngs, **types)
        self.head = None if config.tied else head()

    def hidden(
        self,
        tokens: Int[Array, "b s"],
        *,
        positions: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        key: Array | None = None,
        rows: Int[Array, " b"] | None = None,
    ) -> Float[Array, "b s e"]:
        """The final hidden states, normalised.

        Args:
          tokens: ids, integer.
          positions: each token's place in its document; from the start of the row by default.
          segment_ids: each token's document within the row (packing); 0 is padding.
          key: randomness for dropout; `None` while evaluating.
          rows: each row's number in the step's batch; in order by default.
        """
        context = self.context(tokens.shape[1], positions=positions, segment_ids=segment_ids, key=key, rows=rows)
        return self.finish(self.layers(self.begin(tokens, positions), context))

    # The steps of `hidden`, which a pipeline takes one by one.

    def begin(self, tokens: Int[Array, "b s"], positions: Int[Array, "b s"] | None = None) -> Any:
        """What the first layer is given."""
        c = self.config
        x = self.embed(tokens)
        if c.embed_scale is not None:
            x = x * jnp.asarray(c.embed_scale, x.dtype)
        if self.positions is not None:
            _check_length(c, tokens.shape[1])
            x = x + self.positions(jnp.broadcast_to(_place(tokens.shape[1], positions), tokens.shape))
        return c.stack.enter(x)

    def context(self, seq: int, *, positions: Array | None = None, **told: Any) -> Context:
        """What every layer is told: the arguments of `hidden`, for rows of `seq` tokens."""
        c = self.config
        kinds = (_rotary(c.positions), c.local_positions)
        place = _place(seq, positions)
        rotary = {r: r.tables(place, c.sizes.head_dim) for r in kinds if r is not None}
        return Context(positions=positions, rotary=rotary, **told)

    def layers(self, x: Any, context: Context, parts: Sequence[Part | None] | None = None) -> Any:
        """All runs, or of each the part that these parameters are."""
        for run, part in zip(self.runs, parts or [None] * len(self.runs), strict=True):
            x = run(x, context, part)
        return x

    def finish(self, x: Any) -> Float[Array, "b s e"]:
        """The final hidden states, normalised, from what the last layer returns."""
        x = self.config.stack.leave(x, jnp.dtype(self.config.dtype))
        return constrain(self.norm(x), "batch", "seq", "embed")

    def head_weight(self) -> Float[Array, "v e"]:
        """The output head as it is kept: the token embedding when tied."""
        return (self.embed if self.head is None else self.head).weight.get_value()

    @property
    def logit_softcap(self) -> float | None:
        """The soft cap on logits that a loss must apply."""
        return self.config.logit_softcap

    def __call__(self, tokens: Int[Array, "b s"], **context: Any) -> Float[Array, "b s v"]:
        """Logits, float32, soft-capped; for sampling and tests. Arguments as `hidden`."""
        return head_logits(self.hidden(tokens, **context), self.head_weight(), softcap=self.logit_softcap)


def _make_group(c: TransformerConfig, windows: tuple[int | None, ...], rngs: nnx.Rngs) -> list[Block]:
    z = c.sizes
    types: dict[str, Any] = dict(dtype=jnp.dtype(c.dtype), param_dtype=jnp.dtype(c.param_dtype))
    norm = functools.partial(c.norm, z.width, eps=c.norm_eps, **types)
    out_scale = 1 / math.sqrt(2 * c.depth)  # keeps the residual stream's variance from growing with depth (GPT-2)
    blocks = []
    for window in windows:
        positions = c.local_positions if window is not None and c.local_positions is not None else c.positions
        attn = Attention(
            z.width,
            z.heads,
            z.kv_heads,
            z.head_dim,
            kernel=c.attention,
            rotary=_rotary(positions),
            window=window,
            softcap=c.attention_softcap,
            scale=c.attention_scale,
            qk_norm=c.qk_norm,
            bias=c.qkv_bias or c.bias,
            out_bias=c.bias,
            out_scale=out_scale,
            norm_eps=c.norm_eps,
            overlap="attention" in c.overlap,
            rngs=rngs,
            **types,
        )
        given: dict[str, Any] = {"overlap": True} if "mlp" in c.overlap else {}
        mlp = c.mlp(z.width, z.hidden, bias=c.bias, out_scale=out_scale, rngs=rngs, **given, **types)
        blocks.append(
            Block(
                attn,
                mlp,
                norm(),
                None if c.parallel else norm(),
                attn_post_norm=norm() if c.post_norm else None,
                mlp_post_norm=norm() if c.post_norm else None,
                memory=MemoryPolicy.of(c.memory),
                dropout=c.dropout,
            )
        )
    return blocks


def _place(seq: int, positions: Array | None) -> Array:
    return jnp.arange(seq, dtype=jnp.int32)[None] if positions is None else positions


def _rotary(positions: Rotary | Learned | None) -> Rotary | None:
    return None if isinstance(positions, Learned) else positions


def _check_length(c: TransformerConfig, seq: int) -> None:
    if isinstance(c.positions, Learned) and seq > c.positions.length:
        raise ConfigError(
            f"a sequence of {seq} tokens is longer than the {c.positions.length} learned positions; set "
            f"LearnedPositions.length = {seq} or a shorter train.seq_len"
        )
