"""The config of a decoder-only transformer, and what follows from it: sizes, layers, parameters, FLOPs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout, TensorInfo, abstract
from jaxscale.models.block_config import BlockConfig, LayerSpec
from jaxscale.models.other_width import at_width
from jaxscale.models.positions import Learned, rotary_of
from jaxscale.models.sizes import Sizes, gated
from jaxscale.models.transformer_checks import check_row, check_transformer, idle
from jaxscale.models.transformer_formulas import ahead_products, forward_products, residuals
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
    PerLayer,
    ProductRule,
    Products,
    Projection,
    QKNorm,
    RMSNorm,
    Rotary,
    Run,
    ScalesByLength,
    SharedBlocks,
    SwiGLU,
    dot_product_attention,
)
from jaxscale.nn.products import rules_of
from jaxscale.optim.mup import Parametrisation, Widening
from jaxscale.renamed import renamed

if TYPE_CHECKING:
    from jaxscale.models.transformer import Transformer


@renamed(for_texts_of="for_length", kept_width="cache_width")
@register(name="Transformer")
@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer (`jaxscale.models.Transformer.Config`; `Transformer` in gin).

    `depth` alone gives a sensible small model: width 64 per layer, heads of 64 (32 below width 256), a feed-forward
    of 8/3 (gated) or 4 times the width. Every other size can be set.

    Args:
      depth: number of layers.
      vocab: number of token ids.
      width: width of the residual stream; `None` follows from `depth`, as above.
      heads: number of query heads; `None` follows from `width` and `head_dim`.
      kv_heads: number of key heads; `None` is `heads`.
      head_dim: width of a head; `None` follows from `width` and `heads`.
      hidden: hidden width of the feed-forward layers; `None` follows from `width`.
      norm: `RMSNorm`, `LayerNorm` or another norm with that signature.
      norm_eps: epsilon of the norms.
      mlp: `SwiGLU`, `GeGLU`, `GELU` or another layer with that signature; `MixtureOfExperts(...)` for experts.
      dense_mlp: the feed-forward layer of the layers that `dense_layers` and `mlp_every` leave without `mlp`.
      dense_layers: number of first layers that have `dense_mlp` (DeepSeek).
      mlp_every: after those, every n-th layer has `mlp` and the others `dense_mlp` (GShard: 2).
      blocks: a pattern of different layers, repeated over the depth (see `BlockConfig`), in place of `windows`,
        `dense_mlp`, `dense_layers` and `mlp_every`.
      attention: an attention kernel (see `jaxscale.nn.AttentionKernel`).
      attention_layer: computes queries, keys and values: `MultiHead()`, `GatedMultiHead()` (Qwen3-Next), or
        `MultiHeadLatent(...)` (DeepSeek), which has its own head widths.
      positions: `Rotary(...)`, `Learned(length)` or `None`.
      windows: attention windows of consecutive layers, repeated over the depth: `(1024, 1024, None)` is two local
        layers for each global one.
      local_positions: positions of the layers that have a window, if they differ (Gemma 3).
      qk_norm: RMS-normalise each head's queries and keys; or another `QKNorm(...)`.
      attention_softcap: soft cap on attention scores (Gemma 2), or `None`.
      logit_softcap: soft cap on output logits (Gemma 2), or `None`.
      residual_scale: factor on what each sub-layer adds to the residual stream (Granite).
      per_layer: what blocks do after their sub-layers: inputs of their own, a factor on the stream (Gemma 4).
      logit_scale: factor on the output logits, before a soft cap; it multiplies the final hidden states (Granite).
      attention_scale: factor on the scores; `1 / sqrt(head_dim)` by default (`MultiHeadLatent` has another default).
      qkv_bias: add biases to the query, key and value projections.
      bias: add biases to all projections.
      tied: the output head is the token embedding.
      parallel: attention and feed-forward layer read the same normalised input.
      pre_norm: norms before each sub-layer; without them `post_norm` is needed (OLMo-2).
      post_norm: norms after each sub-layer (Gemma 2).
      embedding: `Embedding`, or `StableEmbedding` for training with 8-bit optimizer states.
      soft_prompt: number of vectors before each row, in place of token embeddings (`SoftPrompt` trains them alone).
      multi_token: number of modules that predict further tokens (DeepSeek-V3: 1); `NextTokens` trains them.
      embed_scale: factor on token embeddings (Gemma: sqrt of the width), or `None`.
      embed_gradient: factor on the gradient of the token embedding, 0.1 in GLM-130B (Zeng et al. 2022); that of a tied
        output head is not scaled.
      dropout: dropout probability on each sub-layer's output in training.
      attention_dropout: probability that an attention weight is dropped in training, after the softmax.
      dtype: dtype of the computation; norms, softmax and loss are float32 in any case.
      param_dtype: dtype of the parameters.
      products: the numbers in which layers multiply with their matrices, such as `Int8()`, or a tuple of `ProductRule`;
        `None` is `dtype`. The embedding, the output head, routers and attention scores are in `dtype` or wider.
      memory: which activations are saved for the backward pass: a `MemoryPolicy`, or a key of `jaxscale.nn.POLICIES`.
      overlap: sub-layers ("attention", "mlp") that overlap matrix products with the collectives of a sequence sharded
        over `tensor` (`Layout(..., sequence_sharded=True)`).
      stack: `Run`, or `ReversibleRun`, whose activation memory does not grow with depth.
      shared: consecutive layers with the same matrices, `SharedBlocks(uses=2)`; `None` gives each layer its own.
      scan: apply each run of layers by one scan, whose compile time does not grow with depth; `False` unrolls them.
        "auto" unrolls up to 8 layers on one CPU or GPU without recomputation (see `jaxscale.nn.stack.scanned`).
      parametrisation: how initial values, learning rates and logits depend on the width, such as `MuP(base_width=64)`
        (see `jaxscale.optim.mup`); `None` is the standard parametrisation.

    Raises:
      ConfigError: settings that do not work together.
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
    soft_prompt: int = 0
    multi_token: int = 0
    embed_scale: float | None = None
    embed_gradient: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    per_layer: PerLayer | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    products: Products | ProductRule | tuple[ProductRule, ...] | None = None
    memory: str | MemoryPolicy = "none"
    overlap: tuple[str, ...] = ()
    stack: type[Run] = Run
    shared: SharedBlocks | None = None
    scan: bool | str = "auto"
    parametrisation: Parametrisation | None = None

    def __post_init__(self) -> None:
        for name in ("windows", "overlap", "blocks"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                nearest = () if value is None and name != "windows" else (value,)
                raise ConfigError(f"Transformer.{name} = {value!r}: must be a tuple, such as {nearest!r}")
            object.__setattr__(self, name, tuple(value))
        check_transformer(self)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """All sizes, including those that follow from others."""
        width = self.width or max(64, 64 * self.depth)
        head_dim = self.head_dim or (width // self.heads if self.heads else 64 if width >= 256 else 32)
        dims = self.attention_layer.dims(head_dim)
        heads = self.heads or max(1, width // dims.key)
        hidden = self.hidden or (math.ceil(width * 8 / 3 / 64) * 64 if gated(self.mlp) else 4 * width)
        return Sizes(width, heads, self.kv_heads or heads, dims.key, hidden, dims.value, dims.rotary)

    def for_length(self, length: int) -> TransformerConfig:
        """Return the config for sequences that may grow to a length, which LongRoPE depends on.

        Args:
          length: the most tokens of a sequence.
        """
        changes: dict[str, Any] = {}
        for name in ("positions", "local_positions"):
            rotary = getattr(self, name)
            if isinstance(rotary, Rotary) and isinstance(rotary.scaling, ScalesByLength):
                changes[name] = dataclasses.replace(rotary, scaling=rotary.scaling.for_length(length))
        return dataclasses.replace(self, **changes) if changes else self

    @property
    def max_length(self) -> int | None:
        """The most tokens of a sequence: the number of learned positions, or `None`."""
        return self.positions.length if isinstance(self.positions, Learned) else None

    def dropless(self) -> TransformerConfig:
        """Return the config of the same model without dropped tokens, if its router does not need a capacity."""
        return self._with_experts(MixtureOfExperts.dropless)

    def on_any_mesh(self) -> TransformerConfig:
        """Return the config of the same model whose experts have the default dispatcher."""
        return self._with_experts(MixtureOfExperts.on_any_mesh)

    @property
    def sends_codes(self) -> bool:
        """Whether a dispatcher of its experts sends codes in place of rows."""
        mixtures = [mlp for mlp in (self.mlp, *(b.mlp for b in self.blocks)) if isinstance(mlp, MixtureOfExperts)]
        return any(m.dispatcher is not None and m.dispatcher.sends_codes for m in mixtures)

    def _with_experts(self, change: Callable[[MixtureOfExperts], MixtureOfExperts]) -> TransformerConfig:
        """This config with its mixtures of experts changed; the same object if they all stay equal."""

        def changed(mlp: Any) -> Any:
            return change(mlp) if isinstance(mlp, MixtureOfExperts) else mlp

        blocks = tuple(dataclasses.replace(b, mlp=changed(b.mlp)) for b in self.blocks)
        if (changed(self.mlp), blocks) == (self.mlp, self.blocks):
            return self
        return dataclasses.replace(self, mlp=changed(self.mlp), blocks=blocks)

    def idle(self, seq_len: int, layout: Layout | None) -> Iterator[tuple[str, Any, str]]:
        """Yield the settings that differ from their default and have no effect: name, value, reason.

        Args:
          seq_len: tokens per row.
          layout: the layout of the run, or `None`.
        """
        return idle(self, seq_len, layout)

    def not_in_formulas(self) -> str | None:
        """See `jaxscale.models.Plannable`: formulas cover attention, and experts or one kind of dense feed-forward."""
        if not self.causal:
            return "Bidirectional"
        if self.products is not None:
            return "Transformer.products"
        if self.shared is not None:
            return "Transformer.shared"
        if self.soft_prompt:
            return "Transformer.soft_prompt"
        if self.multi_token:
            return "Transformer.multi_token"
        if self.per_layer is not None:
            return "Transformer.per_layer"
        if MemoryPolicy.of(self.memory).fp8:
            return "MemoryPolicy.fp8"
        uncovered = [m for m in (self.attention_layer, *self.other_mixers) if not m.in_formulas]
        if uncovered or self.other_mixers:  # the formulas assume one kind of mixer
            return " and ".join(dict.fromkeys(type(m).__name__ for m in uncovered or self.other_mixers))
        others = [(layer, b.mlp) for layer, b in enumerate(self.blocks) if b.mlp not in (None, self.mlp)]
        for layer, mlp in others:
            if isinstance(mlp, MixtureOfExperts):
                return f"layer {layer}, whose experts are not those of Transformer.mlp"
            if mlp != others[0][1]:
                return f"layer {layer}, whose feed-forward layer is of a third kind besides Transformer.mlp"
        return None

    def at_width(self, width: int) -> TransformerConfig:
        """Return the config of the same model with another residual width; see `jaxscale.models.other_width`.

        Args:
          width: the new width of the residual stream.
        """
        return at_width(self, width)

    def number_types(self) -> tuple[str, ...]:
        """Return the types of operands of products that not every chip has; see `jaxscale.models.base`."""
        chosen = (rule.products for rule in rules_of(self.products))
        return tuple(dict.fromkeys(name for p in chosen if p is not None for name in p.rates))

    def length_unit(self) -> int:
        """Return the number that attention needs a sequence's length to be a multiple of under the layout in force."""
        return self.attention.unit() if isinstance(self.attention, ContextKernel) else 1

    def check_row(self, seq_len: int) -> None:
        """Check rows of a length under the layout in force; see `jaxscale.models.base.ChecksRows`.

        Args:
          seq_len: tokens per row.
        """
        check_row(self, seq_len)

    def check_documents(self, segment_ids: np.ndarray) -> None:
        """Check the documents of packed rows; see `jaxscale.models.base.ChecksDocuments`.

        Args:
          segment_ids: the document of each token, (B, S).
        """
        for mixer in self.other_mixers:
            mixer.check_documents(segment_ids)

    @functools.cached_property
    def widening(self) -> Widening | None:
        """The changes of the parametrisation; `None` is the standard parametrisation."""
        return None if self.parametrisation is None else self.parametrisation.of(self)

    @property
    def qk_norm_of(self) -> QKNorm | None:
        """The normalisation of queries and keys, or `None`."""
        return (QKNorm() if self.qk_norm else None) if isinstance(self.qk_norm, bool) else self.qk_norm

    @property
    def score_scale(self) -> float:
        """The factor on attention scores, including defaults and parametrisation."""
        scale = self.attention_scale if self.widening is None else self.widening.attention_scale
        if scale is not None:
            return scale
        return self.attention_layer.score_scale(self.sizes.head_dim, rotary_of(self.positions))

    @property
    def runs(self) -> tuple[tuple[tuple[int | None, ...], int], ...]:
        """Runs of layers as (windows of one group, repeats); the remainder of a pattern is a separate run.

        With `shared`, each repeat of a group is as many times as many layers as it has uses.
        """
        windows = self.layer_windows()
        runs: list[tuple[tuple[int | None, ...], int]] = []
        for first, last, period in self.sections:
            whole, rest = divmod(last - first, period * self.uses)
            runs += [(tuple(windows[first : first + period]), whole)] if whole else []
            runs += [(tuple(windows[last - rest : last]), 1)] if rest else []
        return tuple(runs)

    @property
    def sections(self) -> tuple[tuple[int, int, int], ...]:
        """The first dense layers, and the others: first layer, last one plus 1, and length of the repeated pattern."""
        return (0, self.dense_layers, len(self.windows)), (self.dense_layers, self.depth, self._period)

    @property
    def uses(self) -> int:
        """How many layers share one block's weights."""
        return 1 if self.shared is None else self.shared.uses

    @property
    def _period(self) -> int:
        """The number of layers after which the pattern of blocks repeats."""
        return len(self.blocks) or math.lcm(len(self.windows), self.mlp_every)

    def layer_specs(self) -> list[LayerSpec]:
        """Return the parts of every layer."""
        if self.blocks:
            specs = [
                LayerSpec(b.mixer or self.attention_layer, b.mlp or self.mlp, b.window, b.rotary) for b in self.blocks
            ]
            return [specs[i % len(specs)] for i in range(self.depth)]
        after = range(1 - self.dense_layers, self.depth + 1 - self.dense_layers)  # 1 is the first after the dense ones
        mlps = [self.mlp if i > 0 and i % self.mlp_every == 0 else self.dense_mlp for i in after]
        windows = [self.windows[i % len(self.windows)] for i in range(self.depth)]
        return [LayerSpec(self.attention_layer, mlp, window) for mlp, window in zip(mlps, windows, strict=True)]

    def positions_of(self, window: int | None) -> Rotary | Learned | None:
        """Return the positions of layers with a window.

        Args:
          window: the window, `None` for layers without one.
        """
        return self.positions if window is None or self.local_positions is None else self.local_positions

    def rotary_widths(self) -> dict[Rotary, int]:
        """Return the rotary positions of the model, each with the width that it rotates.

        Raises:
          ConfigError: layers with the same positions have heads of different widths.
        """
        kinds = (rotary_of(self.positions), self.local_positions)
        widths: dict[Rotary, set[int]] = {r: set() for r in kinds if r is not None}
        for layer in self.layer_specs():
            rotary = rotary_of(self.positions_of(layer.window)) if layer.rotary else None
            if rotary is not None:
                own = getattr(layer.mixer, "head_dim", None) if layer.mixer.windowed else None
                widths[rotary].add(own or self.sizes.rotary_dim)
        for rotary, several in widths.items():
            if len(several) > 1:
                raise ConfigError(
                    f"{rotary!r} is of layers with heads of the widths {sorted(several)}; give those with a window "
                    "Transformer.local_positions of another kind, or all layers the same width"
                )
        return {r: next(iter(several), self.sizes.rotary_dim) for r, several in widths.items()}

    @property
    def other_mixers(self) -> tuple[Mixer, ...]:
        """The mixers of `blocks`, each once, other than `attention_layer`."""
        mixers = (b.mixer for b in self.blocks[: self.depth])
        return tuple(dict.fromkeys(m for m in mixers if m is not None and m != self.attention_layer))

    def layer_mlps(self) -> list[Callable[..., FeedForward | Experts]]:
        """Return what makes the feed-forward layer of every layer."""
        return [layer.mlp for layer in self.layer_specs()]

    def describe(self, layout: Layout | None) -> str:
        """Return a line for the log about how layers are applied on a layout.

        Args:
          layout: the layout of the run, or `None`.
        """
        with layout or contextlib.nullcontext():
            memory = MemoryPolicy.of(self.memory)
            counts = [len(group) * repeats * self.uses for group, repeats in self.runs]
            ways = ["scanned" if self.stack.scans(self.scan, n, memory) else "unrolled" for n in counts]
        layers = ", ".join(f"{n} {way}" for n, way in zip(counts, ways, strict=True))
        rules = self.products if isinstance(self.products, tuple) else () if self.products is None else (self.products,)
        shared = "" if self.shared is None else f"; {self.uses} layers share the matrices of each block"
        products = f"; products: {', '.join(map(repr, rules))}" if rules else ""
        return f"layers: {layers} (Transformer.scan = {self.scan!r}){shared}{products}"

    @property
    def causal(self) -> bool:
        """Whether a token attends to itself and earlier tokens only."""
        return getattr(self.attention, "causal", True)

    def layer_windows(self) -> list[int | None]:
        """Return the attention window of every layer."""
        return [layer.window for layer in self.layer_specs()]

    def make(self, rngs: nnx.Rngs) -> Transformer:
        """Make the model.

        Args:
          rngs: random streams of the initial values.
        """
        from jaxscale.models.transformer import Transformer  # late, because that module imports this one

        model = Transformer(self, rngs=rngs)
        if self.widening is not None:
            self.widening.rescale(model)
        return model

    def param_count(self) -> int:
        """Return the number of parameters, tied ones once, without making them."""
        _, infos = abstract(lambda: self.make(nnx.Rngs(0)))
        return sum(i.size for i in jax.tree.leaves(infos))

    def active_param_count(self) -> int:
        """Return the number of parameters that a token uses: of a layer's experts, those that are chosen for it."""
        _, infos = abstract(lambda: self.make(nnx.Rngs(0)))
        mlps, first, unused = self.layer_mlps(), 0, 0
        for run, (group, repeats) in zip(infos["runs"].values(), self.runs, strict=True):
            for block, mlp in zip(run["blocks"].values(), mlps[first:], strict=False):
                if isinstance(mlp, MixtureOfExperts):
                    share = 1 - mlp.top_k / mlp.experts
                    unused += sum(round(i.size * share) for i in jax.tree.leaves(block) if "experts" in i.axes)
            first += len(group) * repeats * self.uses
        return sum(i.size for i in jax.tree.leaves(infos)) - unused

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int:
        """Return the FLOPs of matrix products in one pass over a batch.

        A multiply-add is two FLOPs. Of a layer's experts, those chosen for a token count. Attention counts only pairs
        of tokens that the causal mask and window leave. A backward pass counts as two forward passes, and
        recomputation is not counted, nor are lookups, norms and softmax. The modules of `multi_token` are part of
        training alone.

        Args:
          batch: number of rows.
          seq: tokens per row.
          training: forward and backward pass; else the forward pass only.
        """
        forward = sum(self.product_flops(batch, seq).values())
        return 3 * (forward + sum(ahead_products(self, batch, seq).values())) if training else forward

    def product_flops(self, batch: int, seq: int) -> dict[str, int]:
        """Return the FLOPs of a forward pass by the name of the product's result, over all layers.

        Args:
          batch: number of rows.
          seq: tokens per row.
        """
        return forward_products(self, batch, seq)

    @property
    def cache_width(self) -> int:
        """How many numbers the KV cache of an attention layer stores per token."""
        return self.attention_layer.cache_width(self.sizes.kv_heads, self.sizes.head_dim)

    def projections(self) -> tuple[Projection, ...]:
        """Return the matrix products before one layer's attention scores."""
        z = self.sizes
        return self.attention_layer.projections(z.width, z.heads, z.kv_heads, z.head_dim)

    def activations(self, batch: int, seq: int, layer: int = -1) -> dict[str, tuple[TensorInfo, ...]]:
        """Return the residuals of one layer, by the tensor names of memory policies.

        Two more names are not of memory policies: "scores" are the attention weights, which only
        `dot_product_attention` stores; "unnamed" are tensors that only a policy with rest="keep" saves: float32 inputs
        of norms and of their scales, and a gate's sigmoid, activation and slope.

        Args:
          batch: number of rows.
          seq: tokens per row.
          layer: the layer's number; by default the last.

        Raises:
          ConfigError: the layer's mixer is not `attention_layer`.
        """
        return residuals(self, batch, seq, layer)
