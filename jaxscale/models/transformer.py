"""The decoder-only transformer."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import constrain
from jaxscale.layout.tensors import Tree
from jaxscale.models.base import arrange
from jaxscale.models.block_config import LayerSpec
from jaxscale.models.multi_token import MultiToken
from jaxscale.models.positions import rotary_of
from jaxscale.models.soft_prompt import with_prompt
from jaxscale.models.transformer_checks import check_order, check_positions
from jaxscale.models.transformer_config import TransformerConfig
from jaxscale.nn import (
    Block,
    BlockEnd,
    Context,
    ContextKernel,
    Embedding,
    LayerInputs,
    MemoryPolicy,
    NoFeedForward,
    NoMixer,
    Part,
    Run,
    RunCache,
    ScalesByLength,
    Stats,
    WithInputs,
    head_logits,
)
from jaxscale.nn.products import HeadWeight, apply_products, head_arithmetic
from jaxscale.nn.stats import total
from jaxscale.parallel import Weight


class Transformer(nnx.Module):
    """A decoder-only transformer: an embedding, runs of stacked blocks, and an output head.

    A loss takes `hidden` and `head_weight`, never logits.

    Args:
      config: the settings.
      rngs: random streams of the initial values.
    """

    Config = TransformerConfig

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        z = config.sizes
        types: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype))
        # a factor on embeddings (Gemma: sqrt(width)) is undone in their initial values
        scale = 0.02 if config.embed_scale is None else 1 / config.embed_scale
        self.embed = config.embedding(config.vocab, z.width, scale=scale, rngs=rngs, **types)
        length = config.max_length
        self.positions = (
            Embedding(length, z.width, axis="positions", rngs=rngs, **types) if length is not None else None
        )
        inputs = config.per_layer is not None and config.per_layer.width is not None
        self.layer_inputs = LayerInputs(config, rngs=rngs) if inputs else None
        # not sharded along its rows, which are few
        rows = config.soft_prompt
        self.prompt = Embedding(rows, z.width, axis="positions", rngs=rngs, **types) if rows else None
        runs, first, layers = [], 0, config.layer_specs()
        for windows, repeats in config.runs:
            make_group = functools.partial(_make_group, config, layers[first : first + len(windows)])
            options: dict[str, Any] = dict(memory=MemoryPolicy.of(config.memory), scan=config.scan, rngs=rngs)
            runs.append(config.stack(make_group, repeats, first=first, shared=config.shared, **options))
            first += repeats * config.uses * len(windows)
        self.runs = nnx.List(runs)
        self.norm = config.norm(z.width, eps=config.norm_eps, **types)
        head = functools.partial(Embedding, config.vocab, z.width, scale=z.width**-0.5, rngs=rngs, **types)
        self.head = None if config.tied else head()
        last = functools.partial(_make_group, config, layers[-1:])
        ahead = [MultiToken(config, last, first=config.depth + k, rngs=rngs) for k in range(config.multi_token)]
        self.multi_token = nnx.List(ahead) if ahead else None
        self.head_arithmetic = head_arithmetic(config.products, config.dtype)
        apply_products(self, config.products)

    def hidden(self, tokens: Int[Array, "b s"], **inputs: Any) -> Float[Array, "b s e"]:
        """Return the final hidden states, normalised.

        Args:
          tokens: ids, integer.
          **inputs: as of `hidden_and_stats`.
        """
        return self.hidden_and_stats(tokens, **inputs)[0]

    def hidden_and_stats(
        self,
        tokens: Int[Array, "b s"],
        *,
        positions: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        mask_positions: Int[Array, "b s"] | None = None,
        key: Array | None = None,
        rows: Int[Array, " b"] | None = None,
        arranged: bool = False,
        cache: Sequence[RunCache] | None = None,
    ) -> tuple[Float[Array, "b s e"], Stats]:
        """Return the final hidden states, normalised, and the statistics of the layers (`{}` without experts).

        Args:
          tokens: ids, integer.
          positions: position of each token in its document; counted from the start of the row by default.
          segment_ids: document of each token within the row (packing); its tokens are in the order of their positions,
            without gaps. 0 is padding.
          mask_positions: what the causal mask compares in place of `positions`: tokens with one number attend to each
            other (see `jaxscale.step.BlankInfilling`); each row is then one document.
          key: random key for dropout; `None` in evaluation.
          rows: number of each row in the step's batch; in order by default.
          arranged: columns, also those of the result, are in the order of `order`; else in their natural order.
          cache: the cache of past tokens of each run, to which these tokens are added. The cache then computes
            attention, `positions` are those of its step, and columns are never reordered.
        """
        if cache is None:
            tokens, positions, segment_ids = with_prompt(self.config, tokens, positions, segment_ids)
        order = None if cache is not None else self.order(tokens.shape[1])
        if order is not None and not arranged:
            each = (tokens, positions, segment_ids, mask_positions)
            tokens, positions, segment_ids, mask_positions = arrange(each, order)
        inputs: dict[str, Any] = dict(segment_ids=segment_ids, mask_positions=mask_positions, key=key, rows=rows)
        context = self.context(tokens.shape[1], positions=positions, order=order, **inputs)
        x, stats = self.layers(self.begin(tokens, positions, order, packed=cache is not None), context, cache=cache)
        x = self.finish(x)
        if cache is None and self.prompt is not None:
            x = constrain(x[:, self.config.soft_prompt :], "batch", "seq", "embed")
        return (x if order is None or arranged else arrange(x, np.argsort(order), "embed")), stats

    @property
    def ahead(self) -> int:
        """The number of modules that predict further tokens."""
        return self.config.multi_token

    def hidden_ahead(
        self,
        hidden: Float[Array, "b s e"],
        tokens: Sequence[Int[Array, "b s"]],
        *,
        positions: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        key: Array | None = None,
        rows: Int[Array, " b"] | None = None,
        arranged: bool = False,
    ) -> tuple[list[Float[Array, "b s e"]], Stats]:
        """Return the hidden states that predict tokens further ahead; see `jaxscale.models.base.PredictsAhead`.

        Args:
          hidden: the result of `hidden`, in the columns' order that `arranged` names.
          tokens: for each depth k from 1 the ids of token i + k at position i.
          positions: see `hidden_and_stats`.
          segment_ids: see `hidden_and_stats`.
          key: see `hidden_and_stats`.
          rows: see `hidden_and_stats`.
          arranged: see `hidden_and_stats`.
        """
        order = self.order(hidden.shape[1])
        each: Any = (hidden, tuple(tokens), positions, segment_ids)
        if order is not None and not arranged:
            each = (arrange(hidden, order, "embed"), *arrange(each[1:], order))
        hidden, tokens, positions, segment_ids = each
        inputs: dict[str, Any] = dict(segment_ids=segment_ids, key=key, rows=rows)
        context = self.context(hidden.shape[1], positions=positions, order=order, **inputs)
        states, reported = [], []
        for k, (module, ids) in enumerate(zip(self.multi_token or (), tokens, strict=True)):
            with jax.named_scope(f"multi_token/{k}"):
                hidden, stats = module(hidden, self._scaled(ids), context)
                states.append(self._for_head(hidden))
            reported.append(stats)
        if order is not None and not arranged:
            states = arrange(states, np.argsort(order), "embed")
        return states, total(reported)

    @property
    def ahead_runs(self) -> list[Run]:
        """The blocks of each module that predicts further tokens."""
        return [module.run for module in self.multi_token or ()]

    def decode_ahead(
        self,
        module: int,
        hidden: Float[Array, "b s e"],
        tokens: Int[Array, "b s"],
        *,
        positions: Int[Array, "b s"],
        segment_ids: Int[Array, "b s"],
        cache: RunCache,
    ) -> tuple[Float[Array, "b s e"], Float[Array, "b s e"]]:
        """Return one module's hidden states, with a cache, and those for the head; see `models.base.DecodesAhead`.

        Args:
          module: its number, from 0.
          hidden: those of the module before, or the result of `hidden`.
          tokens: the ids of token i + module + 1 at position i.
          positions: see `hidden_and_stats`.
          segment_ids: see `hidden_and_stats`.
          cache: of the module's blocks.
        """
        assert self.multi_token is not None
        context = self.context(hidden.shape[1], positions=positions, segment_ids=segment_ids).caching(cache)
        with jax.named_scope(f"multi_token/{module}"):
            embedded = self._scaled(tokens)
            hidden, _ = self.multi_token[module](hidden.astype(embedded.dtype), embedded, context)
        return hidden, self._for_head(hidden)

    # The parts of `hidden`, which pipeline stages call one by one.

    def begin(
        self,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"] | None = None,
        order: Int[np.ndarray, "s"] | None = None,
        *,
        packed: bool = False,
    ) -> Tree:
        """Return the input of the first layer: the token embedding, with learned positions if there are any.

        Args:
          tokens: ids, integer; those from the vocabulary's size on are the vectors of `soft_prompt` in order.
          positions: position of each token in its document; counted from the start of the row by default.
          order: position of each column, if columns are not in the natural order.
          packed: the columns of a row are tokens of several sequences (generation), so its length is not checked.
        """
        c = self.config
        with jax.named_scope("embed"):
            x = self._embedded(tokens if self.prompt is None else jnp.minimum(tokens, c.vocab - 1))
            if self.prompt is not None:
                own = self.prompt(jnp.clip(tokens - c.vocab, 0, c.soft_prompt - 1))
                x = jnp.where((tokens >= c.vocab)[..., None], own.astype(x.dtype), x)
            if c.embed_scale is not None:  # of the prompt, too, whose vectors begin as rows of the table
                x = x * jnp.asarray(c.embed_scale, x.dtype)
            if self.positions is not None:
                if not packed:
                    check_positions(c, tokens.shape[1])
                x = x + self.positions(jnp.broadcast_to(_positions_of(tokens.shape[1], positions, order), tokens.shape))
            x = c.stack.enter(x)
        return x if self.layer_inputs is None else WithInputs(x, self.layer_inputs(tokens, x))

    def _scaled(self, tokens: Int[Array, "b s"]) -> Float[Array, "b s e"]:
        """The embeddings that modules of multi-token prediction read."""
        x, scale = self._embedded(tokens), self.config.embed_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def _embedded(self, tokens: Int[Array, "b s"]) -> Float[Array, "b s e"]:
        x, share = self.embed(tokens), self.config.embed_gradient
        if share == 1:
            return x
        part = jnp.asarray(share, x.dtype)
        return x * part + jax.lax.stop_gradient(x) * (1 - part)

    def context(
        self,
        seq: int,
        *,
        positions: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        mask_positions: Int[Array, "b s"] | None = None,
        order: Int[np.ndarray, "s"] | None = None,
        **inputs: Any,
    ) -> Context:
        """Return the inputs that all layers share.

        Args:
          seq: number of columns.
          positions: see `hidden_and_stats`.
          segment_ids: see `hidden_and_stats`.
          mask_positions: see `hidden_and_stats`.
          order: position of each column, if columns are not in the natural order.
          **inputs: `key` and `rows`, see `hidden_and_stats`.

        Raises:
          ConfigError: there are both segments and `mask_positions`.
        """
        c = self.config
        if mask_positions is not None and segment_ids is not None:
            raise ConfigError("mask_positions need rows of one document each; leave out segment_ids")
        if positions is not None and segment_ids is not None:
            # the positions of padding are its columns, as context-parallel attention requires
            positions = jnp.where(segment_ids == 0, _positions_of(seq, None, order), positions)
        place = _positions_of(seq, positions, order)
        rotary = {r: r.tables(place, width) for r, width in c.rotary_widths().items()}
        columns = None if order is None else jnp.asarray(order, jnp.int32)
        masks = positions if mask_positions is None else mask_positions
        return Context(masks, segment_ids, rotary, order=columns, layers=c.depth + c.multi_token, **inputs)

    def layers(
        self,
        x: Tree,
        context: Context,
        parts: Sequence[Part | None] | None = None,
        cache: Sequence[RunCache] | None = None,
    ) -> tuple[Tree, Stats]:
        """Apply the layers; return the result and the statistics of the layers.

        Args:
          x: the result of `begin`, or of earlier layers.
          context: the inputs that layers share.
          parts: for each run, which repeats of its group these parameters are; `None` is all.
          cache: the cache of each run, or `None`.
        """
        none = [None] * len(self.runs)
        reported = []
        for n, (run, part, run_cache) in enumerate(zip(self.runs, parts or none, cache or none, strict=True)):
            with jax.named_scope(f"runs/{n}"):
                x, stats = run(x, context.caching(run_cache), part)
            reported.append(stats)
        return x, total(reported)

    def finish(self, x: Tree) -> Float[Array, "b s e"]:
        """Return the final hidden states, normalised.

        Args:
          x: the result of the last layer.
        """
        x = x.x if isinstance(x, WithInputs) else x
        with jax.named_scope("norm"):
            c = self.config
            x = constrain(self.norm(c.stack.leave(x, jnp.dtype(c.dtype))), "batch", "seq", "embed")
        return self._for_head(x)  # here, so that every loss and head has the factor

    def _for_head(self, hidden: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        c = self.config
        scale = c.logit_scale * (1 if c.widening is None else c.widening.logits)
        return hidden if scale == 1 else hidden * jnp.asarray(scale, hidden.dtype)

    def order(self, seq_len: int) -> Int[np.ndarray, "s"] | None:
        """Return the position of each column, in the column order that layers need under the layout in force.

        A caller that reorders its arrays (`arrange`) and sets `arranged` spares `hidden` reordering there and back.

        Args:
          seq_len: the global sequence length.

        Returns:
          int array (seq_len,), or `None` for the natural order.

        Raises:
          LayoutError: the order breaks up groups of tokens that share an expert's slots, or a mixer needs the natural
            order, or there is a soft prompt.
        """
        attention = self.config.attention
        order = attention.order(seq_len) if isinstance(attention, ContextKernel) else None
        if order is not None:
            if self.prompt is not None:
                raise LayoutError("a soft prompt needs columns in their order; use a mesh without the axis context")
            check_order(self.config, order)
        return order

    def refuse_length(self, length: int) -> None:
        """Check that rotary positions do not change while a sequence grows.

        Args:
          length: the most tokens of a sequence.

        Raises:
          ConfigError: they do (see `jaxscale.nn.LongRopeScaling`).
        """
        for rotary in (rotary_of(self.config.positions), self.config.local_positions):
            if rotary is not None and isinstance(rotary.scaling, ScalesByLength):
                rotary.scaling.refuse_length(length)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids that stand for the vectors of `soft_prompt`, with which every sequence of a cache begins."""
        c = self.config
        return tuple(range(c.vocab, c.vocab + c.soft_prompt))

    @property
    def max_length(self) -> int | None:
        """The most tokens of a sequence, or `None`."""
        return self.config.max_length

    def check_independent(self) -> None:
        """Raise `ConfigError` if the result for a sequence depends on the other sequences of a step."""
        for run in self.runs:
            for block in run.blocks:
                block.check_independent()

    def head_weight(self) -> Float[Array, "v e"] | Weight:
        """Return the stored weight of the output head: the token embedding, if tied."""
        weight = (self.embed if self.head is None else self.head).weight.get_value()
        return weight if self.head_arithmetic is None else HeadWeight(weight, self.head_arithmetic)

    @property
    def logit_softcap(self) -> float | None:
        """The soft cap on logits that a loss must apply."""
        return self.config.logit_softcap

    def __call__(self, tokens: Int[Array, "b s"], **context: Any) -> Float[Array, "b s v"]:
        """Return logits, float32, soft-capped; arguments as `hidden_and_stats`."""
        return head_logits(self.hidden(tokens, **context), self.head_weight(), softcap=self.logit_softcap)


def _make_group(c: TransformerConfig, group: Sequence[LayerSpec], rngs: nnx.Rngs) -> list[Block]:
    z = c.sizes
    types: dict[str, Any] = dict(dtype=jnp.dtype(c.dtype), param_dtype=jnp.dtype(c.param_dtype))
    norm = functools.partial(c.norm, z.width, eps=c.norm_eps, **types)
    out_scale = 1 / math.sqrt(2 * c.depth)  # keeps the residual stream's variance from growing with depth (GPT-2)
    blocks = []
    for layer in group:
        drops = {"dropout": c.attention_dropout} if c.attention_dropout and layer.mixer.drops else {}
        attn = layer.mixer(
            z.width,
            z.heads,
            z.kv_heads,
            z.head_dim,
            kernel=c.attention,
            rotary=rotary_of(c.positions_of(layer.window)) if layer.rotary else None,
            window=layer.window,
            softcap=c.attention_softcap,
            scale=c.attention_scale if c.widening is None else c.widening.attention_scale,
            qk_norm=c.qk_norm_of,
            bias=c.qkv_bias or c.bias,
            out_bias=c.bias,
            out_scale=out_scale,
            norm_eps=c.norm_eps,
            overlap="attention" in c.overlap,
            rngs=rngs,
            **drops,
            **types,
        )
        mixes, feeds = not isinstance(layer.mixer, NoMixer), layer.mlp is not NoFeedForward
        overlap: dict[str, Any] = {"overlap": True} if "mlp" in c.overlap else {}
        mlp = layer.mlp(z.width, z.hidden, bias=c.bias, out_scale=out_scale, rngs=rngs, **overlap, **types)
        blocks.append(
            Block(
                attn,
                mlp,
                norm() if c.pre_norm and mixes else None,
                norm() if c.pre_norm and feeds and not c.parallel else None,
                attn_post_norm=norm() if c.post_norm and mixes else None,
                mlp_post_norm=norm() if c.post_norm and feeds else None,
                parallel=c.parallel,
                scale=c.residual_scale,
                memory=MemoryPolicy.of(c.memory),
                dropout=c.dropout,
                end=None if c.per_layer is None else BlockEnd(c, rngs=rngs),
            )
        )
    return blocks


def _positions_of(seq: int, positions: Array | None, order: np.ndarray | None) -> Array:
    if positions is not None:
        return positions
    return jnp.asarray(np.arange(seq) if order is None else order, jnp.int32)[None]
