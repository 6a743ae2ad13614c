"""The cross-decoder of SambaY: layers that read the memory and the keys of earlier layers and store nothing."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import constrain
from jaxscale.nn.attention import AttentionKernel
from jaxscale.nn.attention_layer import HeadDims, MultiHead
from jaxscale.nn.cache import Cache, LayerCache, State
from jaxscale.nn.context import Context
from jaxscale.nn.linear import Linear, into, out_of
from jaxscale.nn.mixer import Mixer, check_whole, chosen
from jaxscale.nn.mixers.parts import HEADS
from jaxscale.nn.norms import QKNorm
from jaxscale.nn.ring import is_ring
from jaxscale.nn.rotary import Rotary, rotate
from jaxscale.nn.value_norm import ValueNormMultiHead


class NoState(NamedTuple):
    """The `DecodeState` of a layer that stores nothing of a sequence."""

    def reusable(self, cache: Cache) -> bool:
        """See `DecodeState`."""
        return True

    def init(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> State:
        """See `DecodeState`."""
        return {}

    def axes(self, cache: Cache, name: str) -> tuple[str | None, ...] | None:
        """See `DecodeState`."""
        return None

    def bytes(self, cache: Cache, layers: int, batch: int, slots: int, length: int, back: int) -> int:
        """See `DecodeState`."""
        return 0


class MemoryGate(nnx.Module):
    """`y = W2 (m * silu(W1 x))`, `m` the memory of the last recurrence before this layer in its pattern of blocks.

    Args:
      width: width of the residual stream.
      heads: heads of the memory.
      head_dim: width of a head of the memory.
      out_scale: multiplies the initial standard deviation of the output projection.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        out_scale: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        wide = {"heads": heads, "head_dim": head_dim}
        self.gate = linear({"embed": width}, wide)
        self.out = linear(wide, {"embed": width}, scale=out_scale)
        self.decode_state = NoState()

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer.

        Raises:
          ConfigError: the memory has other heads than this layer.
        """
        (gate,) = into(x, self.gate)
        memory = _of(context, "memory")
        if memory.shape != gate.shape:
            (theirs, width), (ours, mine) = memory.shape[2:], gate.shape[2:]
            raise ConfigError(
                f"GatedMemory reads {ours} heads of {mine}, and the recurrence before it has {theirs} of {width}; set "
                f"GatedMemory.heads = {theirs} and GatedMemory.head_dim = {width}"
            )
        out = memory.astype(gate.dtype) * jax.nn.silu(constrain(gate, *HEADS))
        return out_of(constrain(out, *HEADS), self.out)


class CrossAttention(nnx.Module):
    """Attention to the keys and values of the last attention layer before this one in its pattern of blocks.

    Args:
      width: width of the residual stream.
      heads: number of query heads, a multiple of the other layer's key heads.
      head_dim: width of a head.
      kernel: an `AttentionKernel`.
      rotary: rotates queries, or `None`.
      window: see `jaxscale.nn.dot_product_attention`, like the next two.
      softcap: likewise.
      scale: likewise.
      qk_norm: normalises queries, or `None`.
      bias: add biases to queries.
      out_bias: add a bias to the output projection.
      out_scale: multiplies the initial standard deviation of the output projection.
      norm_eps: epsilon of the query norm.
      overlap: see `jaxscale.nn.FeedForward`.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random streams of the initial values.
      same_window: see `CrossDecoderAttention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        kernel: AttentionKernel,
        rotary: Rotary | None,
        window: int | None,
        softcap: float | None,
        scale: float | None,
        qk_norm: QKNorm | None,
        bias: bool,
        out_bias: bool,
        out_scale: float,
        norm_eps: float,
        overlap: bool,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
        same_window: bool = False,
    ):
        self.same_window = same_window
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        wide = {"heads": heads, "head_dim": head_dim}
        self.q = linear({"embed": width}, wide, bias=bias)
        self.out = linear(wide, {"embed": width}, bias=out_bias, scale=out_scale)
        types = dict[str, Any](eps=norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.q_norm = None if qk_norm is None else qk_norm.make("heads", heads, head_dim, **types)
        self.qk_norm, self.kernel, self.rotary, self.overlap = qk_norm, kernel, rotary, overlap
        self.window, self.softcap, self.scale = window, softcap, scale
        self.decode_state = NoState()

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Apply the layer; with a cache in the context, attend to the other layer's cache."""
        with jax.named_scope("qkv"):
            (q,) = into(x, self.q, overlap=self.overlap)
            q = constrain(q, *HEADS)
            if self.qk_norm is not None and self.q_norm is not None:
                q = self.qk_norm.apply(self.q_norm, q)
            if self.rotary is not None:
                q = rotate(q, *context.rotary[self.rotary])
        with jax.named_scope("mix"):
            keys = _of(context, ("keys", "window", self.window) if self.same_window else "keys")
            mask = dict[str, Any](window=self.window, softcap=self.softcap, scale=self.scale)
            if isinstance(keys, LayerCache):
                if is_ring(keys.state):
                    raise ConfigError(
                        "CrossAttention reads all keys of a layer with a window, which a ring does not hold; leave out "
                        "the cache's ring, or let the other layer store all keys by ValueNormMultiHead.lends = True"
                    )
                out, _ = keys.cache.attend(keys.state, keys.layer, q, keys.step, value_dim=q.shape[-1], **mask)
            else:
                k, v = keys
                out = self.kernel(q, k, v, causal=True, **context.tokens(), **mask)
        with jax.named_scope("out"):
            return out_of(constrain(out, *HEADS), self.out, overlap=self.overlap)


def _of(context: Context, key: Any) -> Any:
    if context.shared is None or key not in context.shared:
        name = key if isinstance(key, str) else f"{key[0]} ({key[1]} {key[2]})"
        raise ConfigError(
            f"no layer before this one in its pattern of blocks gives {name}; put one before it in Transformer.blocks"
        )
    return context.shared[key]


class _Reads(Mixer):
    """A mixer whose layer reads what an earlier layer of the pattern gives."""

    any_order: ClassVar[bool] = True
    reads: ClassVar[str]
    givers: ClassVar[str]

    def check(self, config: Any) -> None:
        """See `Mixer`."""
        name = type(self).__name__
        first = next((i for i, b in enumerate(config.blocks) if b.mixer == self), 0)
        before = [b.mixer or config.attention_layer for b in config.blocks[:first]]
        if not any(self.reads in m.gives for m in before):
            raise ConfigError(
                f"{name} reads the {self.reads} of a layer before it in Transformer.blocks, and there is none that "
                f"gives it; put a block with {self.givers} before it"
            )
        if not config.stack.decodable:
            raise ConfigError(
                f"{config.stack.__name__} hands nothing from layer to layer, and {name} reads the {self.reads} of an "
                "earlier one; set Transformer.stack = @Run"
            )


@register
@dataclasses.dataclass(frozen=True)
class GatedMemory(_Reads):
    """Gated memory unit (Ren et al. 2025, SambaY): gates what the last recurrence before it computed.

    The memory is the recurrence's output before its norm and gate, of `Mamba2`, `GatedDeltaNet`, `KimiDeltaAttention`,
    `GatedLinearAttention` or `RetNet`, in the same repeat of `Transformer.blocks`.

    Args:
      heads: heads of the memory; `None` is twice the model's, as those of `Mamba2`.
      head_dim: width of a head of the memory; `None` is the model's `head_dim`.

    Raises:
      ConfigError: a number of heads or a width below 1.
    """

    reads: ClassVar[str] = "memory"
    givers: ClassVar[str] = "@Mamba2() or @GatedDeltaNet()"

    heads: int | None = None
    head_dim: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, optional=("heads", "head_dim"))

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`."""
        heads, head_dim = self._sizes(config.sizes.heads, config.sizes.head_dim)
        one = 2 * batch * seq * config.sizes.width * heads * head_dim
        return {"qkv": one, "residual_mid": one}

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> MemoryGate:
        """See `Mixer`."""
        return MemoryGate(width, *self._sizes(heads, head_dim), **chosen(options))

    def _sizes(self, heads: int, head_dim: int) -> tuple[int, int]:
        return self.heads or 2 * heads, self.head_dim or head_dim


@register
@dataclasses.dataclass(frozen=True)
class CrossDecoderAttention(_Reads):
    """Cross-attention of a decoder-decoder (Sun et al. 2024, YOCO; SambaY): queries only, keys of an earlier layer.

    It attends to the keys and values of the last attention layer before it in the same repeat of `Transformer.blocks`,
    and adds nothing to a KV cache. Tokens see themselves and earlier ones.

    Args:
      head_dim: width of a head; `None` is that of the model.
      same_window: read the keys of the last attention layer with the same window (Gemma 3n and 4); else of the last
        attention layer.
    """

    softmax: ClassVar[bool] = True
    windowed: ClassVar[bool] = True
    reads: ClassVar[str] = "keys"
    givers: ClassVar[str] = "attention (@MultiHead())"

    head_dim: int | None = None
    same_window: bool = False

    def __post_init__(self) -> None:
        check_whole(self, optional=("head_dim",))

    def check(self, config: Any) -> None:
        """See `Mixer`: queries and the keys that they meet have the same widths and the same rotary positions."""
        super().check(config)

        def rotary(block: Any) -> Rotary | None:
            positions = config.positions_of(block.window)
            return positions if block.rotary and isinstance(positions, Rotary) else None

        givers: dict[Any, int] = {}
        for i, block in enumerate(config.blocks):
            mixer = block.mixer or config.attention_layer
            if "keys" in mixer.gives:
                givers |= {"last": i, block.window: i}
            if mixer != self:
                continue
            giver = givers.get(block.window if self.same_window else "last")
            if giver is None:
                raise ConfigError(
                    f"block {i} of Transformer.blocks reads the keys of an attention layer before it with the window "
                    f"{block.window}, and there is none; put one before it, or set CrossDecoderAttention.same_window = "
                    "False"
                )
            if rotary(block) != rotary(config.blocks[giver]):
                raise ConfigError(
                    f"block {i} of Transformer.blocks reads the keys of block {giver}, which have other rotary "
                    "positions than its queries; give both the same Block.rotary, and a window to both or to none if "
                    "there are Transformer.local_positions"
                )
            lender = config.blocks[giver].mixer or config.attention_layer
            wide, own = lender.dims(config.sizes.head_dim).key, self.dims(config.sizes.head_dim).key
            if wide != own:
                raise ConfigError(
                    f"block {i} of Transformer.blocks has queries of width {own} and reads the keys of block {giver}, "
                    f"of width {wide}; set CrossDecoderAttention.head_dim = {wide}"
                )

    def dims(self, head_dim: int) -> HeadDims:
        """Return the widths of a head, as `AttentionLayer`.

        Args:
          head_dim: the model's `head_dim`.
        """
        return MultiHead().dims(self.head_dim or head_dim)

    def products(self, config: Any, batch: int, seq: int, window: int | None) -> dict[str, int]:
        """See `Mixer`."""
        z, head_dim = config.sizes, self.dims(config.sizes.head_dim).key
        return ValueNormMultiHead(self.head_dim).products(config, batch, seq, window) | {
            "qkv": 2 * batch * seq * z.width * z.heads * head_dim
        }

    def __call__(self, width: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> CrossAttention:
        """See `Mixer`."""
        return CrossAttention(width, heads, self.head_dim or head_dim, same_window=self.same_window, **options)
