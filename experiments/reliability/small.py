"""The run that faults are tested on: a transformer of 40 thousand parameters on random tokens."""

from __future__ import annotations

from typing import Any

import jaxscale as js


def config(**changes: Any) -> js.TrainConfig:
    """Return its config, with changes."""
    settings: dict[str, Any] = dict(
        model=js.models.Transformer.Config(
            depth=4, width=32, heads=4, kv_heads=2, head_dim=8, hidden=64, vocab=64, tied=False
        ),
        layout=js.Layout("data=-1"),
        data=js.data.synthetic(64, documents=2000, length=64),
        schedule=js.optim.Constant(),
        lr=1e-3,
        steps=50,
        batch_size=8,
        seq_len=16,
        eval_batches=0,
    )
    return js.TrainConfig(**settings | changes)
