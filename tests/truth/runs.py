"""Small runs: text to train on, settings that compile fast, and one finished run that many tests use."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.nn import Embedding, head_logits
from jaxscale.train.checkpoints import flatten

ROOT = Path(__file__).resolve().parents[2]
MESH = "data=2,fsdp=2,tensor=2"
STEPS = 4

TRANSFORMER = """\
train.model = @Transformer()
Transformer.depth = 1
Transformer.width = 32
Transformer.heads = 2
Transformer.hidden = 64
"""
BIGRAM = """\
train.model = @TestBigram()
TestBigram.vocab = 256
"""
REST = """\
train.layout = @Layout()
Layout.mesh = '{mesh}'
train.data = @text_files()
text_files.glob = '{text}/*.txt'
text_files.heldout = 0.2
train.schedule = @Constant()
train.lr = 1e-2
train.steps = {steps}
train.batch_size = 8
train.seq_len = 16
train.eval_batches = 2
"""


@js.config.register(name="TestBigram")
@dataclasses.dataclass(frozen=True)
class Bigram:
    """The smallest model: predicts the next token from this one. It compiles quickly, for tests of the loop."""

    vocab: int = 32
    width: int = 8

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return the module."""
        return _Bigram(self, rngs)

    def param_count(self) -> int:
        """Return the number of parameters."""
        return 2 * self.vocab * self.width

    def flops(self, batch: int, seq: int, *, training: bool = True) -> int:
        """Return the FLOPs of a step, or of a forward pass."""
        return batch * seq * self.vocab * self.width * (6 if training else 2)


class _Bigram(nnx.Module):
    logit_softcap = None

    def __init__(self, config: Bigram, rngs: nnx.Rngs):
        self.embed = Embedding(config.vocab, config.width, scale=0.1, rngs=rngs)
        self.head = Embedding(config.vocab, config.width, scale=0.1, rngs=rngs)

    def hidden(self, tokens: jax.Array, **_: Any) -> jax.Array:
        return self.embed(tokens)

    def head_weight(self) -> jax.Array:
        return self.head.weight.get_value()

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return head_logits(self.hidden(tokens), self.head_weight(), softcap=None)


def bigram(**changes: Any) -> dict[str, Any]:
    """Return settings of a run of `Bigram` on random tokens and one device, without evaluations and TensorBoard."""
    settings: dict[str, Any] = dict(
        model=Bigram(),
        data=js.data.synthetic(32, documents=64, length=64),
        layout=None,
        schedule=js.optim.Constant(),
        lr=1e-2,
        steps=STEPS,
        batch_size=8,
        seq_len=16,
        eval_batches=0,
    )
    return settings | changes


def write_text(folder: Path) -> Path:
    """Write a dozen small documents; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(12):
        (folder / f"{i}.txt").write_text("".join(f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(20)))
    return folder


def write_gin(path: Path, model: str = TRANSFORMER) -> Path:
    """Write a gin file of a small model on eight devices, with its text in the same folder."""
    path.write_text(model + REST.format(mesh=MESH, text=write_text(path.parent / "text"), steps=STEPS))
    return path


def transformer(text: Path, **changes: Any) -> js.TrainConfig:
    """Return the config of `write_gin`, made in Python."""
    settings: dict[str, Any] = dict(
        model=js.models.Transformer.Config(depth=1, width=32, heads=2, hidden=64),
        layout=js.Layout(MESH),
        data=js.data.text_files(f"{text}/*.txt", heldout=0.2),
        schedule=js.optim.Constant(),
        lr=1e-2,
        steps=STEPS,
        batch_size=8,
        seq_len=16,
        eval_batches=2,
    )
    return js.TrainConfig(**settings | changes)


def finish(root: Path) -> js.Run:
    """Train `transformer` in `root/run`; return the run with its state in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSCALE_CACHE", str(root / "cache"))
        return js.fit(transformer(write_text(root / "text")), run=root / "run", quiet=True)


def losses(run: js.Run) -> list[float]:
    """Return the loss of every step."""
    return [row["loss"] for row in run.metrics()]


def on_host(state: Any) -> dict[str, np.ndarray]:
    """Return name -> array of a state, the random key included."""
    return {name: np.asarray(x) for name, x in flatten(state).items()}


def assert_same_bits(got: Any, want: Any) -> None:
    """Assert that two states have the same arrays, bit for bit."""
    got, want = on_host(got), on_host(want)
    assert got.keys() == want.keys()
    different = [k for k in want if got[k].dtype != want[k].dtype or got[k].tobytes() != want[k].tobytes()]
    assert not different, f"these differ: {different}"


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGTERM) -> None:
    """Make a run send itself a signal while it takes this step."""
    place = js.train.loop.Loop._place

    def placed(self: Any, done: int) -> Any:
        if done + 1 == step:
            signal.raise_signal(number)
        return place(self, done)

    monkeypatch.setattr("jaxscale.train.loop.Loop._place", placed)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a subprocess: one CPU device by default, and our modules on its path."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    return {**os.environ, "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT), "COLUMNS": "120", **more}


def start(script: str, argv: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
    """Start a Python script with arguments as a subprocess."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *argv],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
