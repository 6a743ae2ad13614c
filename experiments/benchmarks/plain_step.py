"""A decoder-only transformer and its training step in plain JAX: no Flax, no layout, nothing of jaxscale.

The step that `train_step.py` compares ours with: RMSNorm, rotary positions, SwiGLU, layers stacked and scanned, AdamW
and global-norm clipping by optax, FSDP and Megatron sharding by a spec per tensor. Written by hand for this one model.
As a script it takes one step, so that the time to a first step can be measured:

    python experiments/benchmarks/plain_step.py --metrics first.jsonl --mesh 2,2,2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Layers, residual width, heads, feed-forward width, vocabulary; rows of a batch and tokens of a row."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    hidden: int = 1024
    vocab: int = 256
    batch: int = 8
    seq: int = 256


ROWS = ("data", "fsdp")
SPECS = {
    "embed": P("tensor", "fsdp"),
    "layers": {
        "attn_norm": P(),
        "wq": P(None, "fsdp", "tensor", None),
        "wk": P(None, "fsdp", "tensor", None),
        "wv": P(None, "fsdp", "tensor", None),
        "wo": P(None, "tensor", None, "fsdp"),
        "mlp_norm": P(),
        "gate": P(None, "fsdp", "tensor"),
        "up": P(None, "fsdp", "tensor"),
        "down": P(None, "tensor", "fsdp"),
    },
    "norm": P(),
    "head": P("tensor", "fsdp"),
}


def init(z: Sizes, seed: int = 0) -> dict[str, Any]:
    """Return initial parameters (V E; L E H D; L H D E; L E F; L F E)."""
    keys = iter(jax.random.split(jax.random.key(seed), 9))
    e, h, d, f, n = z.width, z.heads, z.width // z.heads, z.hidden, z.layers

    def normal(std: float, *shape: int) -> jax.Array:
        return std * jax.random.normal(next(keys), shape)

    out = (2 * n) ** -0.5
    return {
        "embed": normal(0.02, z.vocab, e),
        "layers": {
            "attn_norm": jnp.ones((n, e)),
            "wq": normal(e**-0.5, n, e, h, d),
            "wk": normal(e**-0.5, n, e, h, d),
            "wv": normal(e**-0.5, n, e, h, d),
            "wo": normal(e**-0.5 * out, n, h, d, e),
            "mlp_norm": jnp.ones((n, e)),
            "gate": normal(e**-0.5, n, e, f),
            "up": normal(e**-0.5, n, e, f),
            "down": normal(f**-0.5 * out, n, f, e),
        },
        "norm": jnp.ones(e),
        "head": normal(e**-0.5, z.vocab, e),
    }


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """Return a mesh of these sizes whose sharding GSPMD decides."""
    return jax.make_mesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def make_loss(mesh: Mesh | None):
    """Return `loss(params, batch)`, the weighted mean over tokens; it uses `segment_ids` and `positions` of a batch."""

    def pin(x, *spec):
        return x if mesh is None else with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def rms_norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def rotate(x, cos, sin):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def loss(params, batch):
        tokens = batch["tokens"]
        seq, head_dim = tokens.shape[1], params["layers"]["wq"].shape[-1]
        positions = batch.get("positions", jnp.arange(seq)[None])
        frequencies = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
        angle = positions[..., None, None] * jnp.asarray(frequencies, jnp.float32)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        mask = None
        if "segment_ids" in batch:
            ids = batch["segment_ids"]
            mask = ids[:, None, :, None] == ids[:, None, None, :]

        def block(x, w):
            y = rms_norm(x, w["attn_norm"])
            q, k, v = (
                pin(jnp.einsum("bse,ehd->bshd", y, w[n]), ROWS, None, "tensor", None) for n in ("wq", "wk", "wv")
            )
            a = jax.nn.dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, mask=mask, is_causal=True)
            x = pin(x + jnp.einsum("bshd,hde->bse", a, w["wo"]), ROWS, None, None)
            # (B S) E: with a three-dimensional input, XLA's CPU backend makes transposed copies to compute the weight
            # gradient, and a step takes 1.5 times as long.
            y = rms_norm(x, w["mlp_norm"]).reshape(-1, x.shape[-1])
            h = pin(jax.nn.silu(y @ w["gate"]) * (y @ w["up"]), ROWS, "tensor")
            return pin(x + (h @ w["down"]).reshape(x.shape), ROWS, None, None), None

        table = pin(params["embed"], "tensor", None)  # rows are not sharded: GSPMD would gather the whole table
        x = pin(table[tokens], ROWS, None, None)
        x, _ = jax.lax.scan(block, x, params["layers"])
        logits = pin(jnp.einsum("bse,ve->bsv", rms_norm(x, params["norm"]), params["head"]), ROWS, None, "tensor")
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(each * batch["weights"]) / jnp.sum(batch["weights"])

    return loss


def make_optimizer(lr: float, steps: int, warmup: int) -> optax.GradientTransformation:
    """Return clipping at 1, then AdamW with linear warm-up and cosine decay; norms have no weight decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, steps, lr * 0.1)
    decayed = jax.tree.map_with_path(lambda path, _: "norm" not in path[-1].key, SPECS, is_leaf=_is_spec)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_step(tx: optax.GradientTransformation, mesh: Mesh | None = None):
    """Return jitted `(params, opt_state, batch) -> (params, opt_state, loss, gradient norm)`; it donates its state."""
    loss = make_loss(mesh)

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.global_norm(grads)

    if mesh is None:
        return jax.jit(step, donate_argnums=(0, 1))
    params, opt_state = shardings(tx, mesh)
    rows, whole = NamedSharding(mesh, P(ROWS)), NamedSharding(mesh, P())
    return jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(params, opt_state, rows),
        out_shardings=(params, opt_state, whole, whole),
    )


def shardings(tx: optax.GradientTransformation, mesh: Mesh):
    """Return the shardings of parameters and optimizer state."""
    params = jax.tree.map(lambda s: NamedSharding(mesh, s), SPECS, is_leaf=_is_spec)
    state = jax.eval_shape(lambda: tx.init(init(Sizes(layers=1, width=2, heads=1, hidden=2, vocab=2))))
    whole = NamedSharding(mesh, P())
    return params, optax.tree.map_params(tx, lambda _, s: s, state, params, transform_non_params=lambda _: whole)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def main() -> None:
    """Take one step and write its loss and gradient norm."""
    parser = argparse.ArgumentParser(description="One training step from random weights; writes a line of JSON.")
    parser.add_argument("--metrics", required=True, help="file for the line of JSON")
    parser.add_argument("--mesh", help="sizes of data,fsdp,tensor on simulated devices (default: one device)")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    args = parser.parse_args()
    z = Sizes(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Sizes)})
    mesh = None
    if args.mesh:
        sizes = [int(n) for n in args.mesh.split(",")]
        jax.config.update("jax_num_cpu_devices", int(np.prod(sizes)))
        mesh = make_mesh(*sizes)
    text = np.fromfile(os.__file__, np.uint8)
    rows = np.resize(text, z.batch * (z.seq + 1)).reshape(z.batch, z.seq + 1).astype(np.int32)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": np.ones((z.batch, z.seq), np.float32)}
    tx = make_optimizer(3e-3, 100, 5)
    make = jax.jit(
        lambda: (params := init(z), tx.init(params)), out_shardings=None if mesh is None else shardings(tx, mesh)
    )
    params, opt_state = make()
    _, _, loss, norm = make_step(tx, mesh)(params, opt_state, batch)
    with open(args.metrics, "w") as f:
        f.write(json.dumps({"step": 1, "loss": float(loss), "grad_norm": float(norm)}) + "\n")


if __name__ == "__main__":
    main()
