"""The model and step of `plain_step.py` in eager PyTorch, as a further comparison; imported only with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from plain_step import Sizes
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and SwiGLU, each with RMSNorm before it and a residual connection."""

    def __init__(self, z: Sizes):
        super().__init__()
        self.heads = z.heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(z.width, 1e-6), nn.RMSNorm(z.width, 1e-6)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(z.width, z.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(z.width, z.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(z.hidden, z.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after the block, (B, S, E)."""
        b, s, e = x.shape
        y = self.attn_norm(x)
        q, k, v = (w(y).view(b, s, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.wo(a.transpose(1, 2).reshape(b, s, e))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """The decoder-only transformer of `plain_step.py`."""

    def __init__(self, z: Sizes):
        super().__init__()
        self.embed = nn.Embedding(z.vocab, z.width)
        self.layers = nn.ModuleList(Block(z) for _ in range(z.layers))
        self.norm = nn.RMSNorm(z.width, 1e-6)
        self.head = nn.Linear(z.width, z.vocab, bias=False)
        d = z.width // z.heads
        angle = torch.arange(z.seq)[:, None] * torch.tensor(10000.0 ** (-np.arange(0, d, 2) / d), dtype=torch.float32)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (B, S, V)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Trainer:
    """A model and its optimizer; a call with a batch takes a step and returns its loss.

    Args:
      z: sizes.
      params: initial parameters, in the structure of `plain_step.init`.
      rates: learning rate of each step.
    """

    def __init__(self, z: Sizes, params: dict[str, Any], rates: list[float]):
        self.model, self.rates, self.count = Model(z), rates, 0
        self.model.load_state_dict(_named(z, params))
        norms = [p for n, p in self.model.named_parameters() if "norm" in n]
        others = [p for n, p in self.model.named_parameters() if "norm" not in n]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)

    def __call__(self, batch: dict[str, np.ndarray]) -> float:
        """Take a step and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[self.count]
        tokens, targets = (torch.from_numpy(batch[k]).long() for k in ("tokens", "targets"))
        weights = torch.from_numpy(batch["weights"])
        each = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        loss = (each * weights.flatten()).sum() / weights.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.count += 1
        return loss.item()


def _named(z: Sizes, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return the parameters by torch's names; torch's matrices are (out, in)."""

    def tensor(x: Any) -> Tensor:
        return torch.tensor(np.asarray(x))

    out = {f"{n}.weight": tensor(params[n]) for n in ("embed", "norm", "head")}
    for i in range(z.layers):
        for name, stacked in params["layers"].items():
            x = np.asarray(stacked[i])
            if x.ndim > 1:
                x = (x.reshape(-1, z.width) if name == "wo" else x.reshape(x.shape[0], -1)).T
            out[f"layers.{i}.{name}.weight"] = tensor(x)
    return out
