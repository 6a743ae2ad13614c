"""The shape of a `train_gpu.py` case in PyTorch: SDPA, `torch.compile`, fused AdamW, bfloat16. A process of its own.

It starts from the weights and the batch that our step saved in a folder, where that is given, and reports the first
loss and gradient norm for comparison. AdamW's moments are bfloat16 like the parameters; ours have 8 bits. Nothing is
recomputed. Without a GPU it runs on the CPU, to test the script.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIMED_SECONDS = 20.0
PRODUCTS = 10


class Block(nn.Module):
    """Attention and SwiGLU, each with RMSNorm before it and a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after the block, (B, S, E)."""
        b, s, e = x.shape
        y = self.attn_norm(x)
        q, k, v = (w(y).view(b, s, self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, e))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama that returns the mean loss of tokens and targets, (B, S)."""

    def __init__(self, z: dict[str, Any], seq: int, eps: float = 1e-5, base: float = 10000.0):
        super().__init__()
        self.embed = nn.Embedding(z["vocab"], z["width"])
        self.layers = nn.ModuleList(Block(z["width"], z["heads"], z["hidden"], eps) for _ in range(z["depth"]))
        self.norm = nn.RMSNorm(z["width"], eps)
        self.head = nn.Linear(z["width"], z["vocab"], bias=False)
        angle = np.arange(seq)[:, None] * base ** (-np.arange(0, z["head_dim"], 2) / z["head_dim"])
        for name, table in (("cos", np.cos(angle)), ("sin", np.sin(angle))):
            self.register_buffer(name, torch.tensor(table, dtype=torch.float32), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def load(model: Llama, folder: Path) -> None:
    """Load our initial weights: torch's matrices are (out, in), ours (in, ...) except embedding and head."""

    def tensor(array: np.ndarray) -> Tensor:
        return (
            torch.tensor(array.view(np.int16)).view(torch.bfloat16) if array.dtype == np.uint16 else torch.tensor(array)
        )

    with torch.no_grad():
        for name in ("embed", "norm", "head"):
            getattr(model, name).weight.copy_(tensor(np.load(folder / f"{name}.npy")))
        for name in ("attn_norm", "mlp_norm", "q", "k", "v", "out", "gate", "up", "down"):
            for layer, value in zip(model.layers, tensor(np.load(folder / f"{name}.npy")), strict=True):
                weight = getattr(layer, name).weight
                matrix = value.reshape(weight.shape[1], -1).T if value.ndim > 1 else value
                weight.copy_(matrix)


class Trainer:
    """A model and its optimizer; a call takes a step and waits for its loss."""

    def __init__(self, z: dict[str, Any], rows: int, seq: int, values: Path | None, device: str, compiled: bool):
        torch.manual_seed(0)
        with torch.device(device):
            self.plain = Llama(z, seq)
        buffers = {name: b.clone() for name, b in self.plain.named_buffers()}
        self.plain.to(torch.bfloat16)
        for name, buffer in buffers.items():  # rotary angles stay float32
            setattr(self.plain, name, buffer)
        if values is not None:
            load(self.plain, values)
            batch = [torch.tensor(np.load(values / f"{n}.npy")) for n in ("tokens", "targets")]
        else:
            batch = [torch.randint(z["vocab"], (rows, seq)) for _ in range(2)]
        self.batch = [b.long().to(device) for b in batch]
        self.model = torch.compile(self.plain) if compiled else self.plain
        decayed = [p for p in self.plain.parameters() if p.ndim > 1]
        norms = [p for p in self.plain.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-5, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def __call__(self) -> None:
        """Take a step."""
        loss = self.model(*self.batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.norms.append(norm.item())


@contextlib.contextmanager
def attention(name: str) -> Iterator[None]:
    """Make SDPA prefer cuDNN's kernels, which are faster on Hopper; or leave the order to torch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True) if name == "cudnn" else contextlib.nullcontext():
        yield


def measured(args: argparse.Namespace, device: str, order: str, compiled: bool) -> dict[str, Any]:
    """Time the step in turns with matrix products; return the row."""
    z = json.loads(args.sizes)
    with attention(order):
        start = time.perf_counter()
        step = Trainer(z, args.rows, args.seq, args.values, device, compiled)
        step()
        first = time.perf_counter() - start
        start = time.perf_counter()
        step()
        rounds = int(np.clip(TIMED_SECONDS / (time.perf_counter() - start), 3, args.rounds))
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        size = 8192 if device == "cuda" else 512
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

        def products() -> None:
            for _ in range(PRODUCTS):
                c = a @ b
            c[0, 0].item()

        timed = measure.interleaved({"step": step, "matmul": products}, rounds, warmup=1)
    if not np.isfinite(step.losses).all():
        raise RuntimeError(f"a loss is not finite: {step.losses[:3]} … {step.losses[-1]}")
    speeds = [args.rows * args.seq / s for s in timed["step"].wall]
    low, _, high = statistics.quantiles(speeds, n=4)
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "attention": order,
        "compiled": compiled,
        "same_values": args.values is not None,
        "parameters": sum(p.numel() for p in step.plain.parameters()),
        "first_step_seconds": first,
        "tokens_per_second": {"median": statistics.median(speeds), "low": low, "high": high},
        "timings": {name: dataclasses.asdict(t) for name, t in timed.items()},
        "matmul_tflops": 2 * size**3 * PRODUCTS / statistics.median(timed["matmul"].wall) / 1e12,
        "memory": {"peak": peak},
        "losses": step.losses,
        "trains": step.losses[-1] < step.losses[0],
        "grad_norm": step.norms[0],
    }


def main() -> None:
    """Measure the fastest configuration that works, and write the row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", required=True, help="JSON: depth, vocab, width, heads, head_dim, hidden")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--values", type=Path, help="folder with our initial weights and batch")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    row: dict[str, Any] = {}
    tried: dict[str, str] = {}
    # the fastest configuration first; where it fails, a slower one is better than no comparison
    for order, compiled in (("cudnn", True), ("torch's", True), ("torch's", False))[device == "cpu" :]:
        try:
            row = measured(args, device, order, compiled)
            break
        except Exception as e:
            traceback.print_exc()
            tried[f"{order} attention, {'compiled' if compiled else 'eager'}"] = f"{type(e).__name__}: {e}"[:300]
        with contextlib.suppress(Exception):  # the failure may have broken the GPU's context
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            torch.compiler.reset()
    row = (row or {"problem": "; ".join(f"{config}: {why}" for config, why in tried.items())}) | {"tried": tried}
    args.into.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
