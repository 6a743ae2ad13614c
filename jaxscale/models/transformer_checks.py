"""Checks of a `TransformerConfig`, and its settings without effect."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxscale.errors import ConfigError, LayoutError, check_whole, near
from jaxscale.layout import Layout, current
from jaxscale.models.block_config import BlockConfig
from jaxscale.nn import (
    MADE_WITH,
    CheckedKernel,
    ContextKernel,
    Embedding,
    LowRankExperts,
    MemoryPolicy,
    Mixer,
    MixtureOfExperts,
    ReversibleRun,
    Rotary,
    SharedBlocks,
    SwiGLU,
)
from jaxscale.nn.products import rules_of
from jaxscale.other_names import same
from jaxscale.reading import clipped
from jaxscale.signatures import check_call, check_fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from jaxscale.models.transformer_config import TransformerConfig

KERNEL = (("q", "k", "v"), ("causal", "segment_ids", "positions", "window", "softcap", "scale"))
"""The positional and keyword arguments that an attention kernel is called with."""


def check_transformer(c: TransformerConfig) -> None:
    """Check that a model's parts have the signatures they are called with, and work together.

    Raises:
      ConfigError: they do not.
    """
    for name in ("depth", "vocab", "width", "heads", "kv_heads", "head_dim", "hidden"):
        check_whole(f"Transformer.{name}", getattr(c, name), optional=name not in ("depth", "vocab"))
    rules_of(c.products)
    if c.scan not in (True, False, "auto"):
        raise ConfigError(f"Transformer.scan = {c.scan!r}: must be True, False or 'auto'")
    if c.shared is not None and not isinstance(c.shared, SharedBlocks):
        raise ConfigError(f"Transformer.shared = {c.shared!r}: must be SharedBlocks(uses=2)")
    if isinstance(c.attention_layer, type) or not hasattr(c.attention_layer, "dims"):
        layer, name = c.attention_layer, clipped(getattr(c.attention_layer, "__name__", repr(c.attention_layer)))
        instead = "the nearest is MultiHead(), its default"
        if isinstance(layer, type) and hasattr(layer, "dims"):
            instead = f"write {name}()"
        elif Mixer in type(layer).__mro__:
            instead = "other mixers are set as Block.mixer in Transformer.blocks"
        raise ConfigError(
            f"Transformer.attention_layer = {name}: must be MultiHead(), GatedMultiHead(), SinkMultiHead(), Lizard(), "
            f"CCA(), MultiHeadLatent(...) or DSA(...); {instead}"
        )
    check_fields("Transformer", c)
    _check_numbers(c)
    if not callable(c.attention):
        close = same(str(c.attention), ("dot_product_attention", "flash_attention")) or ["dot_product_attention"]
        raise ConfigError(f"Transformer.attention = {c.attention!r}: must be a kernel; write @{close[0]}")
    check_call("Transformer.attention", c.attention, *KERNEL)
    types = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    overlap: dict[str, Any] = {"overlap": True} if "mlp" in c.overlap else {}
    mlps = [("Transformer.mlp", c.mlp), ("Transformer.dense_mlp", c.dense_mlp)]
    for b in c.blocks:
        if not isinstance(b, BlockConfig):
            raise ConfigError(f"Transformer.blocks has {b!r}: must be a tuple of BlockConfig(...), @Block() in gin")
        mlps += [] if b.mlp is None else [("Block.mlp", b.mlp)]
        if b.mixer is not None:
            check_call("Block.mixer", b.mixer, ("width", "heads", "kv_heads", "head_dim"), MADE_WITH)
            lacks = [name for name in vars(Mixer) if not name.startswith("_") and not hasattr(b.mixer, name)]
            if lacks:
                raise ConfigError(
                    f"Block.mixer = {getattr(b.mixer, '__name__', b.mixer)!r} has no '{lacks[0]}'; make it an instance "
                    "of a class derived from jaxscale.nn.Mixer"
                )
    for name, mlp in mlps:
        if isinstance(mlp, MixtureOfExperts | LowRankExperts):
            mlp.check(c)
        check_call(name, mlp, ("width", "hidden"), ("bias", "out_scale", "rngs", *overlap, *types))
    for b in c.blocks:
        check_fields("Block", b)
    if not isinstance(c.mlp_every, int) or c.mlp_every < 1:
        raise ConfigError(f"Transformer.mlp_every = {c.mlp_every!r}: must be a whole number of at least 1")
    if not isinstance(c.dense_layers, int) or not 0 <= c.dense_layers <= c.depth:
        raise ConfigError(
            f"Transformer.dense_layers = {c.dense_layers!r}: must be a whole number from 0 to the depth, {c.depth}"
        )
    _check_shared(c)
    if isinstance(c.soft_prompt, bool) or not isinstance(c.soft_prompt, int) or c.soft_prompt < 0:
        raise ConfigError(f"Transformer.soft_prompt = {c.soft_prompt!r}: must be a whole number of vectors, 0 for none")
    if c.soft_prompt and c.max_length is not None:
        raise ConfigError(
            "a soft prompt shifts all tokens, and this model adds learned positions; use a model with rotary positions"
        )
    _check_multi_token(c)
    check_call("Transformer.norm", c.norm, ("width",), ("eps", *types))
    check_call("Transformer.embedding", c.embedding, ("vocab", "width"), ("scale", "rngs", *types))
    if not c.windows:
        raise ConfigError("Transformer.windows is empty; use (None,) for global attention everywhere")
    for mixer in dict.fromkeys(layer.mixer for layer in c.layer_specs()):
        mixer.check(c)
        if c.parametrisation is not None and not mixer.widens:
            raise ConfigError(
                f"Transformer.parametrisation does not support {type(mixer).__name__}, which has its own widths; use "
                "MultiHead()"
            )
    c.rotary_widths()
    if c.per_layer is not None:
        c.per_layer.check(c)
    if not c.pre_norm and not (c.post_norm and not c.parallel):
        raise ConfigError(
            "Transformer.pre_norm = False needs norms after the sub-layers, one sub-layer after the other; set "
            "post_norm = True and parallel = False"
        )
    if c.parametrisation is not None and c.embedding is not Embedding:
        raise ConfigError(
            f"Transformer.parametrisation needs Embedding, whose initial values are the same at any width, not "
            f"{c.embedding.__name__}"
        )
    MemoryPolicy.of(c.memory)
    for name in c.overlap:
        if name not in ("attention", "mlp"):
            raise ConfigError(f"Transformer.overlap names the sub-layer '{name}'{near(name, ('attention', 'mlp'))}")
    for rule in rules_of(c.products):
        if getattr(rule.products, "sums", False) and not c.overlap:
            raise ConfigError(
                f"{type(rule.products).__name__}.sums = True acts in overlapped layers only, and there are none: set "
                "Transformer.overlap = ('attention', 'mlp'), or leave sums False"
            )
        if getattr(rule.products, "sums", False) and rule.of_head:
            raise ConfigError(
                f"{type(rule.products).__name__}.sums = True acts in layers named in Transformer.overlap, and the "
                "output head is not one of them; leave sums False in its rule"
            )
    if c.blocks:
        for name, plain in (("windows", (None,)), ("dense_mlp", SwiGLU), ("dense_layers", 0), ("mlp_every", 1)):
            if getattr(c, name) != plain:
                raise ConfigError(
                    f"Transformer.{name} has no effect with Transformer.blocks; set it in the blocks, or remove the "
                    "blocks"
                )
    for w in (*c.windows, *(b.window for b in c.blocks)):
        if w is not None and w < 1:
            where = "Block.window =" if c.blocks else "Transformer.windows has"
            raise ConfigError(f"{where} {w}: must be at least 1, since a window includes the query's own position")
    for b in c.blocks:
        if b.window is not None and b.mixer is not None and not b.mixer.windowed:
            raise ConfigError(
                f"Block.window = {b.window} has no effect with {type(b.mixer).__name__}, which is not attention; "
                "remove it"
            )
        if not b.rotary:
            if b.mixer is not None and not b.mixer.windowed:
                why = f"{type(b.mixer).__name__}, which is not attention"
            elif c.local_positions is None and not isinstance(c.positions, Rotary):
                why = f"Transformer.positions = {c.positions!r}, which is not rotary"
            else:
                continue
            raise ConfigError(f"Block.rotary = False has no effect with {why}; remove it")
    if not 0.0 < c.embed_gradient <= 1.0:
        raise ConfigError(
            f"Transformer.embed_gradient = {c.embed_gradient}: must be above 0 and at most 1 (1 changes nothing)"
        )
    if not 0.0 <= c.dropout < 1.0:
        raise ConfigError(f"Transformer.dropout = {c.dropout}: must be at least 0 and below 1")
    check_attention_dropout(c)
    for name in ("dtype", "param_dtype"):
        if getattr(c, name) not in ("float32", "bfloat16"):
            raise ConfigError(
                f"Transformer.{name} = '{getattr(c, name)}' is not supported; use 'bfloat16' (which needs no loss "
                "scaling) or 'float32'"
            )


def check_attention_dropout(c: TransformerConfig) -> None:
    """Check that a model's attention can drop weights, if it is set to.

    Raises:
      ConfigError: the rate is out of range, or the kernel or a layer of attention has no dropout.
    """
    rate = c.attention_dropout
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"Transformer.attention_dropout = {rate}: must be at least 0 and below 1")
    if not rate:
        return
    mixers = [layer.mixer for layer in c.layer_specs()]
    lacking = [m for m in mixers if m.softmax and not m.drops]
    if lacking or not any(m.drops for m in mixers):
        name = type((lacking or mixers)[0]).__name__
        raise ConfigError(
            f"Transformer.attention_dropout = {rate}: the weights of {name} cannot be dropped; set it to "
            "0, or use MultiHead() in its place"
        )
    kernel = getattr(c.attention, "kernel", c.attention)
    if "dropout" not in inspect.signature(kernel).parameters:
        name = getattr(kernel, "__name__", type(kernel).__name__)
        raise ConfigError(
            f"Transformer.attention_dropout = {rate}: Transformer.attention = {name} has no argument dropout; use "
            "flash_attention or dot_product_attention, or set it to 0"
        )


def _check_numbers(c: TransformerConfig) -> None:
    for name in ("residual_scale", "logit_scale"):
        if not 0 < getattr(c, name) < math.inf:
            raise ConfigError(
                f"Transformer.{name} = {getattr(c, name)!r}: must be above 0 and finite; 1.0 changes nothing"
            )
    if not 0 <= c.norm_eps < math.inf:
        raise ConfigError(f"Transformer.norm_eps = {c.norm_eps!r}: must be at least 0 and finite")
    for name in ("attention_softcap", "logit_softcap"):
        cap = getattr(c, name)
        if cap is not None and not 0 < cap < math.inf:
            raise ConfigError(f"Transformer.{name} = {cap!r}: must be above 0 and finite, or None for no cap")
    for name in ("attention_scale", "embed_scale"):
        factor = getattr(c, name)
        if factor is not None and not math.isfinite(factor):
            raise ConfigError(f"Transformer.{name} = {factor!r}: must be finite, or None")


def _check_multi_token(c: TransformerConfig) -> None:
    check_whole("Transformer.multi_token", c.multi_token, 0)
    if not c.multi_token:
        return
    if c.soft_prompt:
        raise ConfigError("Transformer.multi_token does not work with a soft prompt; set Transformer.multi_token = 0")
    if c.parametrisation is not None:
        raise ConfigError(
            f"{type(c.parametrisation).__name__} has no rule for the modules of Transformer.multi_token; set "
            "Transformer.parametrisation = None"
        )
    if not c.causal:
        raise ConfigError(
            "Transformer.multi_token predicts tokens that a model with attention in both directions has seen; set "
            "Transformer.multi_token = 0"
        )
    last = c.layer_specs()[-1].mixer
    if getattr(last, "reads", None) is not None:
        raise ConfigError(
            f"Transformer.multi_token repeats the last layer's block, and {type(last).__name__} reads an earlier one "
            "of its pattern; end Transformer.blocks with another mixer, or set Transformer.multi_token = 0"
        )


def _check_shared(c: TransformerConfig) -> None:
    if c.shared is None:
        return
    if issubclass(c.stack, ReversibleRun):
        raise ConfigError("Transformer.shared needs Transformer.stack = @Run, since ReversibleRun applies a block once")
    for name, (first, last, period) in zip(("dense_layers", "depth"), c.sections, strict=True):
        unit = period * c.uses
        if (last - first) % unit:
            fits = [n for n in (last - (last - first) % unit, last + unit - (last - first) % unit) if n > 0]
            repeats = (last - first) // period
            uses = [] if (last - first) % period else [n for n in range(2, repeats + 1) if repeats % n == 0]
            uses = sorted(sorted(uses, key=lambda n: abs(n - c.uses))[:2])
            other = f", or SharedBlocks.uses = {' or '.join(map(str, uses))}" if uses else ""
            raise ConfigError(
                f"Transformer.{name} = {last}: {last - first} layers do not divide into groups of {unit} that share "
                f"matrices (SharedBlocks.uses = {c.uses}); set Transformer.{name} = {' or '.join(map(str, fits))}"
                f"{other}"
            )


def check_row(c: TransformerConfig, seq: int) -> None:
    """Check that positions, attention and experts support rows of `seq` tokens under the layout in force.

    Raises:
      ConfigError: the positions or experts do not.
      LayoutError: a mixer does not.
    """
    layout = current()
    if c.soft_prompt and layout is not None and layout.stages > 1:
        raise LayoutError(
            "a soft prompt (Transformer.soft_prompt) does not train on pipeline stages; use a mesh without pipeline"
        )
    if c.multi_token and layout is not None and layout.stages > 1:
        raise LayoutError(
            "the modules of Transformer.multi_token do not train on pipeline stages; use a mesh without pipeline"
        )
    seq += c.soft_prompt
    check_positions(c, seq)
    if layout is not None:
        for mixer in dict.fromkeys(layer.mixer for layer in c.layer_specs()):
            mixer.check_layout(c, layout)
    attends = any(layer.mixer.windowed for layer in c.layer_specs())
    if attends and isinstance(c.attention, CheckedKernel):
        for kv_heads in dict.fromkeys(getattr(layer.mixer, "kv_heads", None) for layer in c.layer_specs()):
            c.attention.check(seq, c.sizes.heads, kv_heads or c.sizes.kv_heads)
    if isinstance(c.attention, ContextKernel) and (order := c.attention.order(seq)) is not None:
        check_order(c, order)
    for mlp in c.layer_mlps():
        if isinstance(mlp, MixtureOfExperts):
            mlp.slots(seq)


def check_order(c: TransformerConfig, order: Int[np.ndarray, "s"]) -> None:
    """Check that mixers and experts support a row's tokens in this column order.

    Raises:
      LayoutError: one does not.
    """
    for layer in c.layer_specs():
        if not layer.mixer.any_order:
            kernel, mixer = type(c.attention).__name__, type(layer.mixer).__name__
            raise LayoutError(
                f"{kernel} reorders the tokens of a row, and {mixer} needs their natural order; set {kernel}.zigzag = "
                "False"
            )
    chunk = math.gcd(len(order), *(np.flatnonzero(np.diff(order) != 1) + 1).tolist())
    for mlp in c.layer_mlps():
        slots = mlp.slots(len(order)) if isinstance(mlp, MixtureOfExperts) else None
        if slots is not None and chunk % slots.group:
            assert isinstance(mlp, MixtureOfExperts)
            layout = current()
            piece = len(order) // (1 if layout is None else layout.split("expert_seq"))
            ways = [f"MixtureOfExperts.group = {math.gcd(chunk, slots.group, piece)}"]
            ways += [] if mlp.router.needs_capacity else ["MixtureOfExperts.capacity = None"]
            ways += [] if piece % slots.group else [f"{type(c.attention).__name__}.zigzag = False"]
            raise LayoutError(
                f"{type(c.attention).__name__} reorders a row of {len(order)} tokens in chunks of {chunk}, which "
                f"breaks up the groups of {slots.group} tokens that share an expert's slots; set {', or '.join(ways)}"
            )


def check_positions(c: TransformerConfig, seq: int) -> None:
    """Raise `ConfigError` if a sequence of `seq` tokens is longer than the learned positions."""
    if c.max_length is not None and seq > c.max_length:
        raise ConfigError(
            f"a sequence of {seq} tokens is longer than the {c.max_length} learned positions; set "
            f"LearnedPositions.length = {seq} or a shorter train.seq_len"
        )


def idle(m: TransformerConfig, seq_len: int, layout: Layout | None) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings that differ from their default and have no effect: name, value, reason.

    Args:
      m: the model's config.
      seq_len: tokens per row.
      layout: the layout of the run, or `None`.
    """
    mlps = m.layer_mlps()
    if m.dense_mlp not in mlps:
        for name in not_default(m, "dense_mlp"):
            yield f"Transformer.{name}", m.dense_mlp, "no layer is dense (Transformer.dense_layers, .mlp_every)"
    if m.blocks:
        yield from _of_blocks(m)
    elif m.mlp not in mlps:
        yield "Transformer.mlp", m.mlp, "every layer is dense (Transformer.dense_layers, .mlp_every)"
    if m.mlp == m.dense_mlp:
        for name in not_default(m, "dense_layers", "mlp_every"):
            yield f"Transformer.{name}", getattr(m, name), "Transformer.dense_mlp is Transformer.mlp"
    windows = [w for w in (*m.windows, *(b.window for b in m.blocks)) if w is not None]
    if m.local_positions is not None and not windows:
        yield "Transformer.local_positions", m.local_positions, "no layer has a window"
    if windows and min(windows) >= seq_len:
        yield (
            "Block.window" if m.blocks else "Transformer.windows",
            tuple(windows) if m.blocks else m.windows,
            f"no window is shorter than a row (train.seq_len = {seq_len})",
        )
    elif len(m.windows) > m.depth:
        yield "Transformer.windows", m.windows, f"those after the first {m.depth} have no layer (Transformer.depth)"
    if m.qkv_bias and m.bias:
        yield "Transformer.qkv_bias", True, "Transformer.bias = True adds a bias to every projection"
    if m.overlap and (layout is None or "tensor" not in layout.cut("residual_seq")):
        yield "Transformer.overlap", m.overlap, "no tensor axis shards the sequence (Layout.sequence_sharded)"
    yield from _of_memory(MemoryPolicy.of(m.memory), seq_len)


def _of_blocks(m: TransformerConfig) -> Iterator[tuple[str, Any, str]]:
    layers = m.layer_specs()
    for name in not_default(m, "mlp"):
        if m.mlp not in m.layer_mlps():
            yield f"Transformer.{name}", m.mlp, "every block of Transformer.blocks has its own mlp"
    attends = any(layer.mixer.windowed for layer in layers)
    used = {
        "attention_layer": any(layer.mixer == m.attention_layer for layer in layers),
        # it also says whether the model is causal, and the order of columns
        "attention": attends or not m.causal or isinstance(m.attention, ContextKernel),
    }
    for name in not_default(m, "attention_layer", "attention", "qk_norm", "qkv_bias", "attention_softcap"):
        if not used.get(name, attends):
            yield f"Transformer.{name}", getattr(m, name), "every block of Transformer.blocks has its own mixer"
    if len(m.blocks) > m.depth:
        yield "Transformer.blocks", m.blocks, f"those after the first {m.depth} have no layer (Transformer.depth)"


def _of_memory(policy: MemoryPolicy, seq_len: int) -> Iterator[tuple[str, Any, str]]:
    if policy.rest == "keep" and policy.keep:
        yield "MemoryPolicy.keep", policy.keep, "MemoryPolicy.rest = 'keep' saves everything"
    if not policy.tile:
        for name in not_default(policy, "tile_size"):
            yield f"MemoryPolicy.{name}", policy.tile_size, "MemoryPolicy.tile is empty"
    elif policy.tile_size >= seq_len:
        yield (
            "MemoryPolicy.tile",
            policy.tile,
            (f"rows have {seq_len} tokens (train.seq_len), one tile of MemoryPolicy.tile_size = {policy.tile_size}"),
        )


def not_default(part: DataclassInstance, *names: str) -> list[str]:
    """Return which of these fields of a dataclass differ from their default."""
    defaults = {f.name: f.default for f in dataclasses.fields(part)}
    return [n for n in names if getattr(part, n) != defaults[n]]
