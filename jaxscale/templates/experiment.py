"""An experiment in one file: a language model, an objective, and a training step on any layout.

    python NAME.py                                  # 60 steps with the loop at the end of this file
    jaxscale train NAME.gin --devices 8             # with jaxscale's loop: checkpoints, evaluation, resuming, samples
    jaxscale explain NAME.gin --devices 8 --import NAME     # where each tensor is, and why

Change anything. Every parameter names its dimensions (`js.named`), and a layout maps these names to devices, so that
no line of the model changes when it is trained on more of them.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxscale as js

# ---- model: a decoder-only Transformer. Arrays are x: (batch, seq, embed) and q, k, v: (batch, seq, heads, head_dim).


def dense(dimensions: dict[str, int], fan_in: int, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    """A float32 parameter; `dimensions` has logical axis names (see `jaxscale.layout.AXES`) and sizes."""
    init = js.named(nnx.initializers.normal(fan_in**-0.5), *dimensions)
    return nnx.Param(init(rngs.params(), tuple(dimensions.values())))


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Divide by the root mean square over the last dimension, in float32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-6)
    return (x32 * scale * gain).astype(x.dtype)


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate pairs of features by angles that grow with the position (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c, size = config, config.width // config.heads
        ones = js.named(nnx.initializers.ones_init(), "norm")
        self.norm1 = nnx.Param(ones(rngs.params(), (c.width,)))
        self.norm2 = nnx.Param(ones(rngs.params(), (c.width,)))
        heads = {"embed": c.width, "heads": c.heads, "head_dim": size}
        self.q, self.k, self.v = (dense(heads, c.width, rngs) for _ in range(3))
        self.out = dense({"heads": c.heads, "head_dim": size, "embed": c.width}, c.width, rngs)
        self.up = dense({"embed": c.width, "mlp": 4 * c.width}, c.width, rngs)
        self.down = dense({"mlp": 4 * c.width, "embed": c.width}, 4 * c.width, rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        """Activations (batch, seq, embed) in and out; `mask` is True where a query attends to a key."""
        h = rms_norm(x, self.norm1[...])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[...]) for w in (self.q, self.k, self.v))
        mixed = jax.nn.dot_product_attention(rotary(q, positions), rotary(k, positions), v, mask=mask)
        x = x + jnp.einsum("bshd,hde->bse", js.constrain(mixed, "batch", "seq", "heads", None), self.out[...])
        h = js.constrain(jax.nn.gelu(rms_norm(x, self.norm2[...]) @ self.up[...]), "batch", "seq", "mlp")
        return js.constrain(x + h @ self.down[...], "batch", "residual_seq", "embed")


class Model(nnx.Module):
    """Tokens (batch, seq) to final hidden states; `head_weight` makes logits of these."""

    logit_softcap = None

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.embedding = js.nn.Embedding(c.vocab, c.width, scale=1.0, rngs=rngs)
        self.blocks = nnx.List([Block(c, rngs=rngs) for _ in range(c.depth)])
        self.norm = nnx.Param(js.named(nnx.initializers.ones_init(), "norm")(rngs.params(), (c.width,)))
        self.head = dense({"vocab": c.vocab, "embed": c.width}, c.width, rngs)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Final hidden states (batch, seq, embed).

        Args:
          tokens: int32 (batch, seq).
          positions: int32 (batch, seq), of each token in its document; by default in its row.
          segment_ids: int32 (batch, seq); tokens attend within their document only.
          key: for dropout, which this model does not have.
        """
        s = tokens.shape[1]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(s), tokens.shape)
        mask = jnp.tril(jnp.ones((s, s), bool))[None, None]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        x = js.constrain(self.embedding(tokens), "batch", "residual_seq", "embed")
        for block in self.blocks:
            x = block(x, positions, mask)
        return rms_norm(x, self.norm[...])

    def head_weight(self) -> jax.Array:
        """The output head, (vocab, embed)."""
        return self.head[...]


@js.config.register(name="CLASSModel")
@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model; gin binds them as `CLASSModel.width = 128`.

    Args:
      vocab: number of tokens; at least those of the tokenizer (bytes: 256); a multiple of 8 shards evenly.
      width: size of the residual stream.
      heads: attention heads; divides the width.
      depth: number of blocks.
    """

    vocab: int = 256
    width: int = 128
    heads: int = 4
    depth: int = 2

    def make(self, rngs: nnx.Rngs) -> Model:
        """Make the module with random parameters."""
        return Model(self, rngs=rngs)


# ---- objective: what training minimises


@js.config.register(name="CLASSObjective")
@dataclasses.dataclass(frozen=True)
class SmoothedNextToken(js.step.Objective):
    """Next-token cross-entropy with label smoothing (Szegedy et al. 2016), a mean over tokens.

    Args:
      smoothing: the probability that the target distribution spreads evenly over all tokens.
    """

    smoothing: float = 0.0

    def inputs(self, config: Any) -> dict[str, js.step.Input]:
        """Arrays of a batch: int32 ids and float32 weights, each (batch, seq)."""
        names = {"tokens": "int32", "targets": "int32", "weights": "float32", "segment_ids": "int32"}
        return {name: js.step.Input((config.seq_len,), dtype, ("seq",)) for name, dtype in names.items()}

    def weights(self, batch: Any, parts: int) -> dict[str, jax.Array]:
        """Sums over a batch that need no model: how many tokens count."""
        return {"tokens": jnp.sum(batch["weights"])}

    def terms(self, model: Any, batch: Any, *, key: Any = None, reference: Any = None) -> dict[str, jax.Array]:
        """Sums that need the model; they add up over micro-batches and devices."""
        hidden = model.hidden(batch["tokens"], segment_ids=batch["segment_ids"], key=key)
        logits = jnp.einsum("bse,ve->bsv", hidden, model.head_weight()).astype(jnp.float32)
        logits = js.constrain(logits, "batch", "seq", "vocab")
        log_probs = jax.nn.log_softmax(logits)
        of_target = jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
        smoothed = (1 - self.smoothing) * of_target + self.smoothing * jnp.mean(log_probs, axis=-1)
        return {"loss": -jnp.sum(smoothed * batch["weights"]), "nats": -jnp.sum(of_target * batch["weights"])}

    def value(self, totals: Any) -> jax.Array:
        """The loss, of sums over the whole batch."""
        return totals["loss"] / jnp.maximum(totals["tokens"], 1.0)

    def metrics(self, totals: Any) -> dict[str, jax.Array]:
        """What a step reports; sweeps and reports compare runs by `loss`."""
        return {"loss": totals["nats"] / jnp.maximum(totals["tokens"], 1.0)}


# ---- step: jit over a layout. `jaxscale train` has its own; change this one when the step is what you study.


class Trainer:
    """Parameters and optimizer state on a layout, and a compiled step.

    Args:
      config: the model.
      objective: what is minimised.
      layout: the mesh and where each name lives on it.
      data: a corpus of `jaxscale.data`.
      lr: learning rate of AdamW.
      batch_size: rows of a batch, over all devices.
      seq_len: tokens of a row.
    """

    def __init__(
        self,
        config: Config,
        objective: js.step.Objective,
        layout: js.Layout,
        *,
        data: Any = None,
        lr: float = 3e-3,
        batch_size: int = 16,
        seq_len: int = 128,
    ):
        self.layout, self.objective = layout, objective
        self.settings = js.TrainConfig(model=config, objective=objective, batch_size=batch_size, seq_len=seq_len)
        corpus = data or js.data.python_stdlib()
        source = corpus.source(js.data.ByteTokenizer(), seq_len=seq_len, split="train")
        self.loader = js.data.Loader(source, batch_size)
        self.inputs = objective.inputs(self.settings)
        self.batch_shardings = js.step.batch_shardings(layout, self.inputs, batch_size)

        self.graphdef, self.infos = js.layout.abstract(lambda: config.make(nnx.Rngs(0)))  # shapes and names, no arrays
        shardings = js.layout.shardings_of(self.infos, layout)
        self.tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr, b2=0.95, weight_decay=0.1))
        with layout:  # arrays are created as shards: no device ever has the whole model
            make = jax.jit(lambda: nnx.to_pure_dict(nnx.split(config.make(nnx.Rngs(0)))[1]), out_shardings=shardings)
            self.params = make()
            self.opt_state = jax.jit(self.tx.init)(self.params)
        self.step = jax.jit(self._step, donate_argnums=(0, 1))

    def _step(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        def loss_of(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            model = nnx.merge(self.graphdef, params)
            totals = self.objective.terms(model, batch) | self.objective.weights(batch, 1)
            return self.objective.value(totals), self.objective.metrics(totals)

        grads, metrics = jax.grad(loss_of, has_aux=True)(params)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    def train(self, steps: int, log_every: int = 10) -> list[float]:
        """Take steps, print some losses and return all of them, nats per token."""
        losses = []
        with self.layout:
            for step in range(steps):
                rows = self.loader.batch_at(step)
                batch = {name: jax.device_put(rows[name], self.batch_shardings[name]) for name in self.inputs}
                self.params, self.opt_state, metrics = self.step(self.params, self.opt_state, batch)
                losses.append(float(metrics["loss"]))
                if step % log_every == 0 or step == steps - 1:
                    print(f"step {step:4d}   loss {losses[-1]:.3f}")
        return losses


def main() -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="data=2,fsdp=2,tensor=2", help="devices of each kind of parallelism")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices; 0 for the real ones")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.devices:
        js.simulate_devices(options.devices)
    trainer = Trainer(Config(), SmoothedNextToken(), js.Layout(options.mesh))
    print(f"layout {options.mesh}; first block's feed-forward: {trainer.params['blocks'][0]['up'].sharding.spec}")
    trainer.train(options.steps)


if __name__ == "__main__":
    main()
