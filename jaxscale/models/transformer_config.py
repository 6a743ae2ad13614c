"""What a decoder-only transformer is told, and what follows from it: sizes, parameters, FLOPs, activations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo, abstract
from jaxscale.models.block_config import BlockConfig, LayerSpec
from jaxscale.models.transformer_checks import check_row, check_transformer, idle
from jaxscale.nn import (
    AttentionKernel,
    AttentionLayer,
    ContextKernel,
    Embedding,
    Experts,
    FeedForward,
    MemoryPolicy,
    Mixer,
    MixtureOfExperts,
    MultiHead,
    Projection,
    QKNorm,
    RMSNorm,
    Rotary,
    Run,
    ScalesByLength,
    SwiGLU,
    dot_product_attention,
)
from jaxscale.optim.mup import Parametrisation, Widening

if TYPE_CHECKING:
    from jaxscale.models.transformer import Transformer


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
      mlp: `SwiGLU`, `GeGLU`, `GELU` or another of that signature; `MixtureOfExperts(...)` for experts.
      dense_mlp: what takes its place in the layers that have none of it.
      dense_layers: so many of the first layers (DeepSeek).
      mlp_every: of the layers after those, all but every n-th one (GShard: 2).
      blocks: a pattern of unlike layers, repeated over the depth (see `BlockConfig`), in place of `windows`,
        `dense_mlp`, `dense_layers` and `mlp_every`.
      attention: an attention kernel (see `jaxscale.nn.AttentionKernel`).
      attention_layer: what makes queries, keys and values for it: `MultiHead()`, or `MultiHeadLatent(...)` (DeepSeek),
        which has widths of its own.
      positions: `Rotary(...)`, `Learned(length)` or `None`.
      windows: attention windows of consecutive layers, repeated over the depth: `(1024, 1024, None)` is two local
        layers for each global one.
      local_positions: positions of the layers that have a window, when they differ (Gemma 3).
      qk_norm: RMS-normalise each head's queries and keys; or another `QKNorm(...)`.
      attention_softcap, logit_softcap: soft caps on attention scores and output logits (Gemma 2).
      attention_scale: factor on the scores, `1 / sqrt(head_dim)` by default (`MultiHeadLatent` has its own).
      qkv_bias, bias: biases on the query, key and value projections, and on all the others.
      tied: the output head is the token embedding.
      parallel: attention and feed-forward side by side, of one norm.
      pre_norm: norms before each sub-layer; without them `post_norm` has to be (OLMo-2).
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
      scan: apply each run of layers by one scan, whose compile time does not grow with depth; `False` unrolls them.
        "auto" unrolls up to 8 layers on one CPU or GPU without recomputation (see `jaxscale.nn.stack.scanned`).
      parametrisation: how initial values, learning rates and logits follow the width, such as `MuP(base_width=64)` (see
        `jaxscale.optim.mup`); `None` is the standard parametrisation.

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
    mlp: Callable[..., FeedForward | Experts] = SwiGLU
    dense_mlp: Callable[..., FeedForward] = SwiGLU
    dense_layers: int = 0
    mlp_every: int = 1
    blocks: tuple[BlockConfig, ...] = ()
    attention: AttentionKernel = dot_product_attention
    attention_layer: AttentionLayer = MultiHead()
    positions: Rotary | Learned | None = Rotary()
    windows: tuple[int | None, ...] = (None,)
    local_positions: Rotary | None = None
    qk_norm: bool | QKNorm = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_scale: float | None = None
    qkv_bias: bool = False
    bias: bool = False
    tied: bool = False
    parallel: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    embedding: Callable[..., Embedding] = Embedding
    embed_scale: float | None = None
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    memory: str | MemoryPolicy = "none"
    overlap: tuple[str, ...] = ()
    stack: type[Run] = Run
    scan: bool | str = "auto"
    parametrisation: Parametrisation | None = None

    def __post_init__(self) -> None:
        for name in ("windows", "overlap", "blocks"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                nearest = () if value is None and name != "windows" else (value,)
                raise ConfigError(f"Transformer.{name} = {value!r}: must be a tuple, as {nearest!r}")
            object.__setattr__(self, name, tuple(value))
        check_transformer(self)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """All sizes, those left to `depth` worked out."""
        width = self.width or max(64, 64 * self.depth)
        head_dim = self.head_dim or (width // self.heads if self.heads else 64 if width >= 256 else 32)
        dims = self.attention_layer.dims(head_dim)
        heads = self.heads or max(1, width // dims.key)
        hidden = self.hidden or (math.ceil(width * 8 / 3 / 64) * 64 if gated(self.mlp) else 4 * width)
        return Sizes(width, heads, self.kv_heads or heads, dims.key, hidden, dims.value, dims.rotary)

    def for_texts_of(self, length: int) -> TransformerConfig:
        """The same model for texts that may reach `length`, where its positions go by that (LongRoPE)."""
        changes: dict[str, Any] = {}
        for name in ("positions", "local_positions"):
            rotary = getattr(self, name)
            if isinstance(rotary, Rotary) and isinstance(rotary.scaling, ScalesByLength):
                changes[name] = dataclasses.replace(rotary, scaling=rotary.scaling.for_texts_of(length))
        return dataclasses.replace(self, **changes) if changes else self

    @property
    def max_length(self) -> int | None:
        """The most tokens of a text, that is of learned positions; `None` where there is no such limit."""
        return self.positions.length if isinstance(self.positions, Learned) else None

    def dropless(self) -> TransformerConfig:
        """The same model without dropped tokens, if its router does not need a capacity."""
        free = lambda mlp: mlp.dropless() if isinstance(mlp, MixtureOfExperts) else mlp  # noqa: E731
        blocks = tuple(dataclasses.replace(b, mlp=free(b.mlp)) for b in self.blocks)
        if (free(self.mlp), blocks) == (self.mlp, self.blocks):
            return self
        return dataclasses.replace(self, mlp=free(self.mlp), blocks=blocks)

    def idle(self, seq_len: int, layout: Layout | None) -> Iterator[tuple[str, Any, str]]:
        """Settings that differ from their default and change nothing: name, value, and why."""
        return idle(self, seq_len, layout)

    def not_in_formulas(self) -> str | None:
        """See `jaxscale.models.Plannable`: they know attention, and experts or one kind of dense feed-forward."""
        if not self.causal:
            return "Bidirectional"
        uncovered = [m for m in (self.attention_layer, *self.other_mixers) if not m.in_formulas]
        if uncovered or self.other_mixers:  # the formulas take all layers for alike
            return " and ".join(dict.fromkeys(type(m).__name__ for m in uncovered or self.other_mixers))
        mlps = dict.fromkeys(b.mlp for b in self.blocks if b.mlp not in (None, self.mlp))
        if len(mlps) > 1 or any(isinstance(mlp, MixtureOfExperts) for mlp in mlps):
            return "blocks whose feed-forward layers are of several kinds besides Transformer.mlp"
        return None

    def at_width(self, width: int) -> TransformerConfig:
        """The same model with another residual width, and all else that is width in proportion.

        What follows from the width by itself goes on to do so. Heads given without a `head_dim` stay as many and widen;
        else there are more of them, and of key heads with them.

        Raises:
          ConfigError: a size that does not come out whole, or an attention whose sizes do not follow the width.
        """
        was = self.sizes
        for layer in self.layer_specs():
            if not layer.mixer.widens:
                raise ConfigError(
                    f"{type(layer.mixer).__name__} has widths of its own, of which it is not worked out how they "
                    "follow the model's; use MultiHead()"
                )

        def scaled(name: str, value: int | None, new: int, old: int) -> int | None:
            if value is not None and value * new % old:
                raise ConfigError(
                    f"{name} = {value} does not come out whole at width {width}, from {was.width}; take a width whose "
                    "sizes divide, or leave the size to follow"
                )
            return None if value is None else value * new // old

        heads = self.heads if self.head_dim is None else scaled("Transformer.heads", self.heads, width, was.width)
        hidden = scaled("Transformer.hidden", self.hidden, width, was.width)

        def widened(mlp: Any) -> Any:
            if not isinstance(mlp, MixtureOfExperts):
                return mlp
            return dataclasses.replace(mlp, hidden=scaled("MixtureOfExperts.hidden", mlp.hidden, width, was.width))

        blocks = tuple(dataclasses.replace(b, mlp=widened(b.mlp)) for b in self.blocks)
        sizes: dict[str, Any] = dict(width=width, heads=heads, kv_heads=None, hidden=hidden)
        wide = dataclasses.replace(self, **sizes, mlp=widened(self.mlp), blocks=blocks)
        key_heads = scaled("Transformer.kv_heads", self.kv_heads, wide.sizes.heads, was.heads)
        return dataclasses.replace(wide, kv_heads=key_heads)

    def length_unit(self) -> int:
        """Of what a sequence's length has to be a multiple under the layout in force, as far as attention goes."""
        return self.attention.unit() if isinstance(self.attention, ContextKernel) else 1

    def check_row(self, seq_len: int) -> None:
        """See `jaxscale.models.base.ChecksRows`."""
        check_row(self, seq_len)

    @functools.cached_property
    def widening(self) -> Widening | None:
        """What its parametrisation makes of it; `None` of the standard one."""
        return None if self.parametrisation is None else self.parametrisation.of(self)

    @property
    def qk_norm_of(self) -> QKNorm | None:
        """What normalises queries and keys."""
        return (QKNorm() if self.qk_norm else None) if isinstance(self.qk_norm, bool) else self.qk_norm

    @property
    def score_scale(self) -> float:
        """The factor on attention scores that is in force."""
        scale = self.attention_scale if self.widening is None else self.widening.attention_scale
        if scale is not None:
            return scale
        return self.attention_layer.score_scale(self.sizes.head_dim, rotary_of(self.positions))

    @property
    def runs(self) -> tuple[tuple[tuple[int | None, ...], int], ...]:
        """Runs of layers as (windows of one group, repeats); the remainder of a pattern is a run of its own."""
        windows, dense = self.layer_windows(), self.dense_layers
        runs: list[tuple[tuple[int | None, ...], int]] = []
        for first, last, period in ((0, dense, len(self.windows)), (dense, self.depth, self._period)):
            whole, rest = divmod(last - first, period)
            runs += [(tuple(windows[first : first + period]), whole)] if whole else []
            runs += [(tuple(windows[last - rest : last]), 1)] if rest else []
        return tuple(runs)

    @property
    def _period(self) -> int:
        """After how many layers the pattern of blocks is the same again."""
        return len(self.blocks) or math.lcm(len(self.windows), self.mlp_every)

    def layer_specs(self) -> list[LayerSpec]:
        """What every layer is made of."""
        if self.blocks:
            whole = [LayerSpec(b.mixer or self.attention_layer, b.mlp or self.mlp, b.window) for b in self.blocks]
            return [whole[i % len(whole)] for i in range(self.depth)]
        after = range(1 - self.dense_layers, self.depth + 1 - self.dense_layers)  # the place behind the dense layers
        mlps = [self.mlp if i > 0 and i % self.mlp_every == 0 else self.dense_mlp for i in after]
        windows = [self.windows[i % len(self.windows)] for i in range(self.depth)]
        return [LayerSpec(self.attention_layer, mlp, window) for mlp, window in zip(mlps, windows, strict=True)]

    @property
    def other_mixers(self) -> tuple[Mixer, ...]:
        """Mixers of blocks, each once, that are not `attention_layer`."""
        mixers = (b.mixer for b in self.blocks[: self.depth])
        return tuple(dict.fromkeys(m for m in mixers if m is not None and m != self.attention_layer))

    def layer_mlps(self) -> list[Callable[..., FeedForward | Experts]]:
        """What makes the feed-forward of every layer."""
        return [layer.mlp for layer in self.layer_specs()]

    def describe(self, layout: Layout | None) -> str:
        """How the layers run on a layout, for the start of a run."""
        with layout or contextlib.nullcontext():
            memory = MemoryPolicy.of(self.memory)
            counts = [len(group) * repeats for group, repeats in self.runs]
            ways = ["scanned" if self.stack.scans(self.scan, n, memory) else "unrolled" for n in counts]
        said = ", ".join(f"{n} {way}" for n, way in zip(counts, ways, strict=True))
        return f"layers: {said} (Transformer.scan = {self.scan!r})"

    @property
    def causal(self) -> bool:
        """Whether a token sees those before it and no other."""
        return getattr(self.attention, "causal", True)

    def layer_windows(self) -> list[int | None]:
        """The window of every layer."""
        return [layer.window for layer in self.layer_specs()]

    def make(self, rngs: nnx.Rngs) -> Transformer:
        """The model itself."""
        from jaxscale.models.transformer import Transformer  # which takes this configuration

        model = Transformer(self, rngs=rngs)
        if self.widening is not None:
            self.widening.rescale(model)
        return model

    def param_count(self) -> int:
        """Number of parameters, tied ones once; counted from the module, which is described but not made."""
        _, infos = abstract(lambda: self.make(nnx.Rngs(0)))
        return sum(i.size for i in jax.tree.leaves(infos))

    def active_param_count(self) -> int:
        """Number of parameters that one token meets: of a layer's experts, those it is given to."""
        _, infos = abstract(lambda: self.make(nnx.Rngs(0)))
        mlps, first, unmet = self.layer_mlps(), 0, 0
        for run, (group, repeats) in zip(infos["runs"].values(), self.runs, strict=True):
            for block, mlp in zip(run["blocks"].values(), mlps[first:], strict=False):
                if isinstance(mlp, MixtureOfExperts):
                    unmet_share = 1 - mlp.top_k / mlp.experts
                    unmet += sum(round(i.size * unmet_share) for i in jax.tree.leaves(block) if "experts" in i.axes)
            first += len(group) * repeats
        return sum(i.size for i in jax.tree.leaves(infos)) - unmet

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int:
        """Matrix-multiplication FLOPs of one pass over `batch` rows of `seq` tokens.

        A multiply-add is two; of a layer's experts, those count that a token is given to. Attention counts the causal
        (and windowed) pairs only, not the square; a backward pass counts as two forward ones, recomputation not at
        all. Lookups, norms and softmax are left out.

        Args:
          training: forward and backward; else forward.
        """
        return sum(self.products(batch, seq).values()) * (3 if training else 1)

    def products(self, batch: int, seq: int) -> dict[str, int]:
        """The forward part of `flops`, by what is made, over all layers."""
        z = self.sizes
        mixed: dict[str, int] = {}
        for layer in self.layer_specs():
            for name, n in layer.mixer.products(self, batch, seq, layer.window).items():
                mixed[name] = mixed.get(name, 0) + n
        through = [(_hidden(m, z.hidden), gated(m), _scores(m)) for m in self.layer_mlps()]
        per_layer = 2 * batch * seq * z.width
        return mixed | {
            "router": per_layer * sum(scores for _, _, scores in through),
            "mlp_up": per_layer * sum(hidden * (1 + gated) for hidden, gated, _ in through),
            "mlp_down": per_layer * sum(hidden for hidden, _, _ in through),
            "logits": 2 * batch * seq * z.width * self.vocab,
        }

    @property
    def kept_width(self) -> int:
        """How many numbers the cache of a layer that attends keeps of a token."""
        return self.attention_layer.kept_width(self.sizes.kv_heads, self.sizes.head_dim)

    def projections(self) -> tuple[Projection, ...]:
        """The products with weights before one layer's scores."""
        z = self.sizes
        return self.attention_layer.projections(z.width, z.heads, z.kv_heads, z.head_dim)

    def activations(self, batch: int, seq: int, layer: int = -1) -> dict[str, tuple[TensorInfo, ...]]:
        """What one layer, by default the last, leaves for its backward pass, by the tensors that memory policies name.

        Two have no such name: "scores", attention's weights, which only `dot_product_attention` holds, and "unnamed",
        which only a policy that keeps all of it keeps: norms' float32 inputs and what they scale, a gate's sigmoid,
        activation and slope.

        Raises:
          ConfigError: the layer's mixer is not `attention_layer`.
        """
        mixer = self.layer_specs()[layer].mixer
        if mixer != self.attention_layer:
            raise ConfigError(
                f"what {type(mixer).__name__} leaves for its backward pass is not known here; `jaxscale plan` takes it "
                "from the traced step"
            )
        z = self.sizes

        def tensors(name: str, sizes: dict[str, int], count: int = 1, dtype: str = self.dtype) -> tuple[Any, ...]:
            axes, shape = ("batch", *sizes), (batch, *sizes.values())
            return (TensorInfo(name, shape, jnp.dtype(dtype), axes),) * count

        stream = {"residual_seq": seq, "embed": z.width}
        last = self.layer_mlps()[layer]
        gates = 1 + gated(last)
        up: tuple[Any, ...] = tensors("mlp_up", {"seq": seq, "mlp": z.hidden}, gates)
        if isinstance(last, MixtureOfExperts):
            one, shared = last.widths(z.hidden)
            rows = {"expert_batch": batch, "expert_seq": seq * last.top_k, "expert_mlp": one}
            if (slots := last.slots(seq)) is not None:
                rows["expert_seq"] = slots.slots * last.experts * (seq // slots.group)
            one_up = TensorInfo("mlp_up", tuple(rows.values()), jnp.dtype(self.dtype), tuple(rows))
            up = (one_up,) * gates + tensors("mlp_up", {"seq": seq, "mlp": shared}, gates if shared else 0)
        heads = {"seq": seq, "heads": z.heads, "head_dim": z.head_dim}
        kv = {"seq": seq, "kv_heads": z.kv_heads, "head_dim": z.head_dim}
        values = {"seq": seq, "kv_heads": z.kv_heads, "head_dim": z.value_dim}
        mixed = {"seq": seq, "heads": z.heads, "head_dim": z.value_dim}
        latent = {"seq": seq, "latent": sum(p.outer for p in self.projections() if p.axis == "latent")}
        norms = (1 if self.parallel else 2) * self.pre_norm + 2 * self.post_norm
        inner = 1 if self.dtype == "float32" else 2
        dense = self.attention is dot_product_attention
        return {
            "residual": tensors("residual", stream),
            "residual_mid": tensors("residual_mid", stream, 0 if self.parallel else 1),
            "norm": tensors("norm", stream, norms),
            "qkv": tensors("q", heads) + tensors("kv", kv) + tensors("kv", values),
            "scores": tensors("scores", {"heads": z.heads, "seq": seq, "kv_seq": seq}, 1 if dense else 0),
            "attn_out": tensors("attn_out", mixed),
            "lse": tensors("lse", {"seq": seq, "heads": z.heads}, 0 if dense else 1, "float32"),
            "mlp_up": up,
            "mlp_hidden": tuple(dataclasses.replace(i, path="mlp_hidden") for i in up[::gates]),
            "unnamed": tensors("norm", stream, norms * inner, "float32")
            + tensors("latent", latent, (2 * inner + 1) * bool(latent["latent"]))
            + tuple(dataclasses.replace(i, path="gate") for i in up[::gates]) * (3 if gates > 1 else 1),
        }


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A transformer's sizes: residual width, heads, key/value heads, width of a query and key, feed-forward width.

    And of a value, and of what rotary positions turn; both as wide as a key but in attentions that say otherwise.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    value_dim: int
    rotary_dim: int


def gated(mlp: Any) -> bool:
    """Whether a feed-forward layer, or each of its experts, multiplies by a gate."""
    return getattr(mlp, "gated", False)


def _hidden(mlp: Any, hidden: int) -> int:
    """The hidden width that one token meets."""
    if not isinstance(mlp, MixtureOfExperts):
        return hidden
    one, shared = mlp.widths(hidden)
    return mlp.top_k * one + shared


def _scores(mlp: Any) -> int:
    return mlp.experts if isinstance(mlp, MixtureOfExperts) else 0


def rotary_of(positions: Rotary | Learned | None) -> Rotary | None:
    """What turns queries and keys, which learned positions do not."""
    return None if isinstance(positions, Learned) else positions
