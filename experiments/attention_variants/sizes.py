"""What variants of attention cost at 24 layers of width 2048, and how near SOFT's landmarks come to its exact kernel.

    python experiments/attention_variants/sizes.py

Counts with the models' formulas and with NumPy in float64; no model is made. Writes sizes.json beside this file and
prints the README's tables. Takes seconds.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxscale.infer.cache import cache_bytes
from jaxscale.infer.cache.contiguous import Contiguous
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import CCA, RAT, SOFT, Bidirectional, CrossDecoderAttention, GatedMemory, Mamba2, MultiHeadLatent
from jaxscale.parallel.landmark_attention import newton_inverse
from jaxscale.step.state import describe_model

LENGTHS = (4096, 131072)
SIZES: dict[str, Any] = dict(
    vocab=32000, width=2048, heads=16, head_dim=128, hidden=5504, depth=24, param_dtype="bfloat16", dtype="bfloat16"
)


def models() -> dict[str, TransformerConfig]:
    """Return the models of the first table."""
    mamba, gate, cross = (BlockConfig(mixer=m) for m in (Mamba2(), GatedMemory(), CrossDecoderAttention()))
    window, full = BlockConfig(window=1024), BlockConfig()
    changes: dict[str, dict[str, Any]] = {
        "attention, 16 key heads": {},
        "attention, 4 key heads (GQA)": {"kv_heads": 4},
        "attention, 2 key heads (GQA)": {"kv_heads": 2},
        "latent attention (MLA), rank 512": {"attention_layer": MultiHeadLatent(), "head_dim": None},
        "CCA, 8 heads, 2 key heads": {"attention_layer": CCA(), "heads": 8, "kv_heads": 2},
        "RAT, chunks of 1": {"blocks": (BlockConfig(mixer=RAT(chunk=1)),)},
        "RAT, chunks of 16": {"blocks": (BlockConfig(mixer=RAT(chunk=16)),)},
        "RAT, chunks of 131,072": {"blocks": (BlockConfig(mixer=RAT(chunk=131072)),)},
        "SambaY, no windows": {"blocks": (*(mamba,) * 11, full, *(gate, cross) * 6)},
        "SambaY, windows of 1024": {"blocks": (*(mamba, window) * 5, mamba, full, *(gate, cross) * 6)},
    }
    return {name: TransformerConfig(**SIZES | change) for name, change in changes.items()}


def bytes_of(config: TransformerConfig, length: int, ring: int | None = None) -> int:
    """Return the bytes that generation stores of one sequence; with `ring`, of windows so many tokens more alone."""
    graphdef, infos = describe_model(config)
    return cache_bytes(nnx.merge(graphdef, infos), Contiguous(ring=ring), 1, 1, length)


def mixing(config: TransformerConfig, length: int) -> float:
    """Return the FLOPs of a token in all layers, without the feed-forward layers and the head."""
    specs = config.layer_specs()
    return sum(sum(s.mixer.products(config, 1, length, s.window).values()) for s in specs) / length


def soft() -> dict[str, Any]:
    """Return errors of SOFT's kernel by landmarks, of Newton's method by iterations, and its FLOPs by length."""
    random = np.random.default_rng(0)
    walk = np.cumsum(0.3 * random.normal(size=(3, 256, 16)), axis=1)  # neighbours are alike, as in an image

    def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        square: np.ndarray = np.sum((x[:, None] - y[None]) ** 2, -1)
        return np.exp(-square / (2 * np.sqrt(x.shape[-1])))

    errors: dict[int, list[float]] = {}
    residuals: dict[int, list[float]] = {}
    for q in walk:
        exact = kernel(q, q)
        for stride in (64, 32, 16, 8, 4, 2):
            marks = q.reshape(-1, stride, q.shape[-1]).mean(1)
            c, a = kernel(q, marks), kernel(marks, marks)
            near = c @ np.linalg.pinv(a, rcond=1e-9, hermitian=True) @ c.T
            errors.setdefault(len(marks), []).append(float(np.linalg.norm(near - exact) / np.linalg.norm(exact)))
            if stride == 4:
                for n in (5, 10, 15, 20, 30):
                    inverse = newton_inverse(a, np.full(len(a), a.sum(0).max()), n)
                    residuals.setdefault(n, []).append(float(np.abs(inverse @ a - np.eye(len(a))).max()))
    lengths = (1024, 4096, 16384)

    def flops(length: int, mixer: SOFT | None) -> float:
        change = {"blocks": (BlockConfig(mixer=mixer),), "attention": Bidirectional()}
        return mixing(TransformerConfig(**SIZES | change), length)

    return {
        "error_by_landmarks": {n: [float(np.mean(e)), float(np.max(e))] for n, e in errors.items()},
        "residual_by_iterations": {n: float(np.max(r)) for n, r in residuals.items()},
        "flops_64_landmarks": {n: flops(n, SOFT(stride=n // 64)) for n in lengths},
        "flops_stride_16": {n: flops(n, SOFT(stride=16)) for n in lengths},
        "flops_softmax": {n: flops(n, None) for n in lengths},
    }


def main() -> None:
    """Count everything, write the file and print the tables."""
    rows = []
    for name, config in models().items():
        stored, flops = ({n: of(config, n) for n in LENGTHS} for of in (bytes_of, mixing))
        row = {"model": name, "parameters": config.param_count(), "bytes": stored, "mixing_flops_a_token": flops}
        rows.append(row)
        if any(spec.window for spec in config.layer_specs()):
            rows.append(row | {"model": f"{name}, in rings", "bytes": {n: bytes_of(config, n, 128) for n in LENGTHS}})
    results = {"models": rows, "soft": soft()}
    file = pathlib.Path(__file__).parent / "sizes.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    for row in rows:
        mib = " | ".join(f"{row['bytes'][n] / 2**20:,.1f}" for n in LENGTHS)
        gflop = " | ".join(f"{row['mixing_flops_a_token'][n] / 1e9:.2f}" for n in LENGTHS)
        print(f"| {row['model']} | {row['parameters'] / 1e9:.2f} G | {mib} | {gflop} |")
    print(json.dumps(results["soft"], indent=1))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
