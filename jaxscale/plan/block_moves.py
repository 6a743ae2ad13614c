"""What the blocks of a transformer send: each product's weights, sums and gradients, by the names of its dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.layout import Boxes, TensorInfo
from jaxscale.nn import MemoryPolicy, MixtureOfExperts, MultiHeadLatent
from jaxscale.nn.reversible import ReversibleRun
from jaxscale.parallel.experts import TOKENS
from jaxscale.plan.attention_moves import Heads, attention_moves
from jaxscale.plan.collectives import Collective
from jaxscale.plan.covered import NotCovered
from jaxscale.plan.moves import Mover, Product

Tree = Any


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks that run so often in a step, on micro-batches of one size.

    Args:
      mover: the layout's.
      model: the transformer's settings.
      rows, seq: of a micro-batch, over all devices.
      forward: how often a block's forward pass runs, the backward pass's own aside.
      backward: how often its backward pass runs, which begins with what the memory policy makes again.
      segments: whether tokens have documents.
      accumulated: in how many micro-batches, one after the other, gradients are made.
      looped: whether they are a loop's body; of a single copy the compiler makes no loop, and gathers weights once.
      ragged: whether experts' tokens are exchanged by a ragged all-to-all (TPU), not padded.
    """

    mover: Mover
    model: Any
    rows: int
    seq: int
    forward: int
    backward: int
    segments: bool
    accumulated: int
    looped: bool
    ragged: bool

    def block(self, params: Tree, window: int | None, last: bool) -> list[Collective]:
        """What one block sends, times its layers.

        Args:
          params: a `TensorInfo` for each of its parameters, "layers" first.
          window: of its attention.
          last: of its group, so that nothing needs its output again.

        Raises:
          NotCovered: an attention layer that nothing is known of here.
        """
        latent = isinstance(self.model.attention_layer, MultiHeadLatent)
        unknown = latent and (self.model.parallel or self.mover.over("seq"))
        if unknown:
            raise NotCovered("MultiHeadLatent where a sequence is cut or sub-layers are parallel")
        inside = jax.tree.map(lambda i: dataclasses.replace(i, axes=i.axes[1:], shape=i.shape[1:]), params)
        attn, mlp = inside["attn"], inside["mlp"]
        routed = "router" in mlp
        dense = mlp.get("shared", {}) if routed else mlp
        z = self.model.sizes
        heads = Heads(self.mover, self.rows, self.seq, z.heads, z.kv_heads, z.head_dim, jnp.dtype(self.model.dtype))
        attend = self.forward + (self.again if not self._finds("attn_out", "lse") else 0)
        found = attention_moves(
            self.model.attention, heads, window, self.segments, attend, self.forward + self.again, self.backward
        )
        norm = self.model.qk_norm_of
        if norm is not None and norm.across_heads:  # a number for each token, of queries and of keys
            times, over = self.forward + self.again + self.backward, self.mover.over("heads")
            found += 2 * self.mover.send("all-reduce", over, heads.ids, times, "norms over all heads, summed")
        ends = self._makes_output_again(last)
        if self.model.parallel and not routed:
            both = {f"attn/{k}": v for k, v in attn.items()} | {f"mlp/{k}": v for k, v in dense.items()}
            found += self._sub_layer("attention and feed-forward", both, "attention", ends)
        else:
            middle = self.again if not self._finds("residual_mid") or self.model.post_norm else 0
            found += self._sub_layer("attention", attn, "attention", middle)
            found += self._latents(attn)
            if dense:
                found += self._sub_layer("shared experts" if routed else "feed-forward", dense, "mlp", ends)
        if routed:
            found += self._experts(mlp, ends)
        for name, part in inside.items():
            for info in jax.tree.leaves(part):
                if len(info.axes) == 1 and info.axes[0] != "router":
                    found += self.vector(info, whole=latent and name == "attn")
        return found

    # --- what is made again ---

    @property
    def again(self) -> int:
        """How often the backward pass starts by running forward once more."""
        return self.backward if self._policy.rest != "keep" or self._reversible else 0

    @property
    def _policy(self) -> MemoryPolicy:
        return MemoryPolicy.of(self.model.memory)

    @property
    def _reversible(self) -> bool:
        return issubclass(self.model.stack, ReversibleRun)

    def _finds(self, *tensors: str) -> bool:
        """Whether the backward pass of a block finds all of these."""
        if self._reversible:
            return False
        products = {"qkv", "residual_mid", "mlp_up"} if self._policy.rest == "dots" else set()
        return self._policy.rest == "keep" or {*tensors} <= {*self._policy.keep, *self._policy.offload} | products

    def _makes_output_again(self, last: bool) -> int:
        """How often a block's output is made again, which a backward pass needs only where something follows."""
        follows = self._reversible or self.model.post_norm or not (last or self._finds("residual"))
        return self.again if follows else 0

    # --- products ---

    @property
    def between(self) -> str:
        """By which name a stream's sequence is cut between sub-layers: the compiler leaves it as experts have it."""
        routed = any(isinstance(m, MixtureOfExperts) for m in self.model.layer_mlps())
        finer = len(self.mover.over("expert_seq")) > len(self.mover.over("residual_seq"))
        return "expert_seq" if routed and finer else "residual_seq"

    def stream(self, axis: str | None = None) -> TensorInfo:
        """The residual stream, its sequence by one of its names; by default as it is between sub-layers."""
        shape, axes = (self.rows, self.seq, self.model.sizes.width), ("batch", axis or self.between, "embed")
        return TensorInfo("the residual stream", shape, jnp.dtype(self.model.dtype), axes)

    def _sub_layer(self, what: str, params: Tree, overlap: str, output_again: int) -> list[Collective]:
        """Products into a hidden width, and out of it.

        Args:
          what: what they are.
          params: their parameters.
          overlap: what a model calls this when it asks for overlap.
          output_again: how often its output is made again.
        """
        kernels = [i for i in jax.tree.leaves(params) if "embed" in i.axes]
        into = [i for i in kernels if i.axes[0] == "embed"]
        out_of = [i for i in kernels if i.axes[-1] == "embed"]
        cut, whole, mover = self.stream(), self.stream("seq"), self.mover
        between, inside = mover.boxes(cut), mover.boxes(whole)
        rings = overlap in self.model.overlap
        # a ring's pieces go round once more for the weights' gradients, which serves what is made again
        found, gathers = [], self.forward + (self.backward if rings else self.again)
        summed: set[str] = set()
        for kernel in into:
            product = self._product(kernel, given=1)
            summed |= product.input_gradient().partial
            found += self.kernel(kernel, product.kernel_gradient(), what)
        terms = Boxes(inside.split, frozenset(summed))
        streams = mover.change(cut, between, inside, gathers, f"{what}'s input gathered")
        streams += mover.change(cut, terms, between, self.backward, f"{what}'s input, its cotangent summed")
        made: set[str] = set()
        for kernel in out_of:
            product = self._product(kernel, given=len(kernel.axes) - 1)
            made |= product.forward().partial
            found += self.kernel(kernel, product.kernel_gradient(), what)
        out = Boxes(inside.split, frozenset(made))
        # float32 streams add a float32 sum: the compiler widens the terms first
        wide = dataclasses.replace(cut, dtype=jnp.dtype("float32")) if self._reversible else cut
        streams += mover.change(wide, out, between, self.forward, f"{what}'s output summed")
        streams += mover.change(cut, out, between, output_again, f"{what}'s output summed again")
        streams += mover.change(cut, between, inside, self.backward, f"{what}'s output, its cotangent gathered")
        return found + ([_as_ring(c) for c in streams] if rings else streams)

    def _latents(self, params: Mapping[str, Any]) -> list[Collective]:
        """Products out of latent attention's vectors, to whose cotangents all heads add; to the turned key's too."""
        found, narrow = [], {}
        for name, part in params.items():
            kernel = part.get("kernel")
            if kernel is not None and kernel.axes[0] == "latent_in":
                product = self._product(kernel, given=1)
                found += self.kernel(kernel, product.kernel_gradient(), "attention")
                narrow["queries' vector" if name.startswith("q") else "keys' and values' vector"] = kernel.shape[0]
        if narrow:
            narrow["the turned key"] = self.model.attention_layer.rotary_dim
        for what, width in narrow.items():
            vector = TensorInfo(what, (self.rows, self.seq, width), jnp.dtype(self.model.dtype), ("batch", "seq", None))
            found += self.mover.summed(vector, self.mover.over("heads"), self.backward, f"{what}, its cotangent summed")
        return found

    def _product(self, kernel: TensorInfo, given: int) -> Product:
        """The product that a kernel stands in, of which its first dimensions are summed."""
        size = dict(zip(kernel.axes, kernel.shape, strict=True))

        def side(axes: Sequence[str | None]) -> TensorInfo:
            shape = (self.rows, self.seq, *(size[a] for a in axes))
            return TensorInfo("a product's operand", shape, jnp.dtype(self.model.dtype), ("batch", "seq", *axes))

        return Product(self.mover, side(kernel.axes[:given]), kernel, side(kernel.axes[given:]))

    def kernel(
        self, kernel: TensorInfo, gradient: Boxes, what: str, dtype: Any = None, *, once: bool = False
    ) -> list[Collective]:
        """A weight brought to where it is used, forward and backward, and its gradient to where that is kept.

        Args:
          kernel: as it is kept.
          gradient: its gradient's signature as the product leaves it.
          what: whose it is.
          dtype: in which it is used; the arithmetic's by default.
          once: the backward pass has it still, as of layers in no loop.
        """
        once = once or not self.looped
        used = dataclasses.replace(kernel, dtype=jnp.dtype(dtype or self.model.dtype))
        kept, there = self.mover.boxes(kernel, "params"), self.mover.boxes(kernel)
        found = self.mover.change(used, kept, there, self.forward, f"gather of {what} weights, forward")
        if not once:
            found += self.mover.change(used, kept, there, self.backward, f"gather of {what} weights, backward")
        return found + self.gradient(kernel, gradient, f"{what} weights", once=once)

    def gradient(self, info: TensorInfo, before: Boxes, what: str, *, once: bool = False) -> list[Collective]:
        """A parameter's gradient, to where the rules for gradients say, in the parameter's own type.

        One that the loop over layers does not hold (`once`), and that is whole after its sum, the compiler sums after
        the last micro-batch.
        """
        found = self.mover.change(info, before, self.mover.boxes(info, "grads"), self.backward, f"gradient of {what}")
        if once and all(c.kind == "all-reduce" for c in found):
            return [dataclasses.replace(c, times=c.times // self.accumulated) for c in found]
        return found

    def vector(self, info: TensorInfo, *, whole: bool = False) -> list[Collective]:
        """The gradient of a norm's scale or of a bias, float32: summed over all that it was applied to.

        Args:
          info: it.
          whole: of a norm, that it was applied within a sub-layer, and not to the stream.
        """
        tokens = {"norm": ("batch", self.between), "head_dim": ("batch", "seq", "heads")}
        over = set(self.mover.over(*tokens.get("" if whole else str(info.axes[0]), ("batch", "seq"))))
        used = self.mover.boxes(info)
        before = Boxes(used.split, frozenset(over - {a for s in used.split for a in s}))
        wide = dataclasses.replace(info, dtype=jnp.dtype("float32"))
        return self.gradient(wide, before, "norms and biases", once=True)

    # --- experts ---

    def _experts(self, params: Mapping[str, Any], output_again: int) -> list[Collective]:
        c: MixtureOfExperts = next(m for m in self.model.layer_mlps() if isinstance(m, MixtureOfExperts))
        mover, between = self.mover, self.mover.boxes(self.stream())
        tokens = dataclasses.replace(self.stream(), axes=TOKENS)
        here = mover.boxes(tokens)
        experts, apart = mover.over("experts"), mover.over("expert_batch", "expert_seq")
        summed = frozenset(m for m in (*experts, *mover.over("expert_mlp")) if m not in apart)
        terms = Boxes(here.split, summed)
        twice = self.forward + self.again
        found = mover.change(tokens, between, here, twice, "experts' tokens gathered")
        found += mover.change(tokens, terms, between, self.forward + output_again, "experts' answers summed")
        found += mover.change(tokens, between, here, self.backward, "experts' answers, their cotangent gathered")
        found += mover.change(tokens, terms, between, self.backward, "experts' tokens, their cotangent summed")
        for name in ("gate", "up", "down"):
            if name in params:
                used = mover.boxes(params[name])
                left = Boxes(used.split, frozenset(m for m in apart if m not in experts))
                found += self.kernel(params[name], left, "experts")
        router = dataclasses.replace(params["router"], dtype=jnp.dtype("float32"))
        kept, used = mover.boxes(router, "params"), mover.boxes(router)
        for times, when in ((self.forward, "forward"), (self.backward * self.looped, "backward")):
            found += mover.change(router, kept, used, times, f"gather of routers' weights, {when}")
        # no product of ours: the partitioner sums it to where the weight is used, and each device keeps its piece
        found += mover.change(router, Boxes(used.split, frozenset(apart)), used, self.backward, "gradient of routers")
        found += self._exchange(c, [m for m in experts if m in apart], [m for m in experts if m not in apart])
        # a shard_map's derivative sums over every axis along which its argument is whole
        rest = [m for m, n in mover.layout.sizes.items() if n > 1 and m not in (*apart, *mover.manual)]
        weights = 4 * c.top_k * (self.rows * self.seq // mover.devices(apart))
        found += mover.send("all-reduce", rest, weights, self.backward, "routers' weights, their cotangent summed")
        # how often each expert was chosen, its mean probability, and what was dropped and the scores' size
        statistics = 4 * (2 * c.experts + 2)
        return found + mover.send("all-reduce", apart, statistics, self.forward, "routers' statistics")

    def _exchange(self, c: MixtureOfExperts, sent: list[str], alike: list[str]) -> list[Collective]:
        """Tokens to their experts and answers back, both ways; and what they are weighed by."""
        mover, devices, itemsize = self.mover, self.mover.devices(sent), jnp.dtype(self.model.dtype).itemsize
        n = self.rows * self.seq // mover.devices(mover.over("expert_batch", "expert_seq"))
        there, width = self.forward + self.again, self.model.sizes.width
        slots = c.slots(self.seq)
        if slots is not None:
            weights = n // slots.group * slots.slots * c.experts // mover.devices(alike)
            rows = weights
        else:
            held = c.experts // mover.devices((*sent, *alike))
            weights = devices * n * min(c.top_k, held)
            rows = n * c.top_k if self.ragged else weights
        name = "all-to-all of experts' tokens"
        found = mover.send("all-to-all", sent, rows * width * itemsize, there + self.backward, f"{name}, there")
        found += mover.send("all-to-all", sent, rows * width * itemsize, self.forward + self.backward, f"{name}, back")
        found += mover.send("all-to-all", sent, 4 * weights, there + self.backward, "all-to-all of routers' weights")
        if slots is None:
            held = c.experts // mover.devices(alike)
            found += mover.send("all-to-all", sent, 4 * held, there, "how many tokens each expert gets")
            if self.ragged:
                found += mover.send("all-to-all", sent, 4 * devices, self.forward + self.backward, "where answers go")
        return found


def _as_ring(c: Collective) -> Collective:
    """The same as a ring of permutes, a piece at a time, beside the products of other pieces."""
    if c.kind not in ("all-gather", "reduce-scatter"):
        return c
    return dataclasses.replace(
        c, kind="collective-permute", payload=c.payload // c.devices, times=c.times * (c.devices - 1), ring=c.kind
    )
