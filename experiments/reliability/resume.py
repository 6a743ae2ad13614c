"""Train 40 steps without interruption, or be killed and resume: every bit is the same, for each kind of layout.

    python -m experiments.reliability.resume --seed 0

For each recipe three processes with eight simulated devices: one trains to the end, one is killed (SIGKILL) some steps
after the checkpoint of step 20, and one resumes from there, after building models, optimizers and layouts of other
recipes in random order. Compared are SHA-256 digests of every array of the state (parameters, optimizer, random key,
state of the guards), and of the rows that come next.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxscale as js
from experiments.reliability import lives
from jaxscale.nn import MixtureOfExperts, RingAttention, SigmoidRouter
from jaxscale.optim import AdamW8bit, EightBit
from jaxscale.step import blueprint_of
from jaxscale.step.guards import FingerprintGuard, FiniteGuard, SpikeGuard
from jaxscale.train import loop

HERE = Path(__file__).parent
STEPS, SAVED, KILLED = 40, 20, 26


def _model(**changes: Any) -> js.models.Transformer.Config:
    sizes: dict[str, Any] = dict(depth=2, vocab=32, width=16, heads=4, head_dim=4, hidden=32, dropout=0.1)
    return js.models.Transformer.Config(**sizes | changes)


def _experts() -> MixtureOfExperts:
    return MixtureOfExperts(experts=4, hidden=16, router=SigmoidRouter())


RECIPES: dict[str, dict[str, Any]] = {
    "data": dict(layout="data=8"),
    "fsdp": dict(layout="fsdp=8"),
    "tensor": dict(layout="data=2,tensor=4"),
    "context": dict(layout="data=2,context=4", model=lambda: _model(attention=RingAttention())),
    "pipeline": dict(layout="data=4,pipeline=2"),
    "expert": dict(layout="data=2,expert=4", model=lambda: _model(mlp=_experts())),
    "8-bit states": dict(
        layout="data=2,fsdp=2,tensor=2",
        model=lambda: _model(width=32, heads=2, head_dim=16, hidden=64),
        optimizer=lambda: AdamW8bit(storage=EightBit(min_size=1024, width=16)),
    ),
    "accumulation": dict(layout="data=2", accumulate=4),
}
"""Recipe -> settings that differ from the common ones."""


def config_of(name: str) -> js.TrainConfig:
    """Return a new config of a recipe."""
    made = {k: v() if callable(v) else v for k, v in RECIPES[name].items()}
    settings: dict[str, Any] = dict(
        model=_model(),
        data=js.data.synthetic(32, documents=64, length=64),
        schedule=js.optim.WarmupCosine(),
        lr=1e-2,
        steps=STEPS,
        batch_size=8,
        seq_len=16,
        eval_batches=0,
        checkpoint_every=SAVED,
        guards=(FiniteGuard(), SpikeGuard(window=8, z=20.0), FingerprintGuard(every=8)),
    )
    return js.TrainConfig(**settings | made | {"layout": js.Layout(made["layout"])})


def digests(run: js.Run) -> dict[str, str]:
    """Return the SHA-256 of every array of a run's last state, and of the rows that would come next."""
    digest_of = {}
    assert run.state is not None
    for path, x in jax.tree_util.tree_leaves_with_path(run.state):
        bits = jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        digest_of[jax.tree_util.keystr(path)] = hashlib.sha256(np.asarray(bits).tobytes()).hexdigest()
    position = int(run.state.step)
    source = run.config.data.source(run.config.tokenizer, seq_len=run.config.seq_len, split="train")
    rows = js.data.Loader(source, run.config.batch_size, run.config.seed).ids_at(position)
    return digest_of | {"data position": hashlib.sha256(f"{position} {rows.tolist()}".encode()).hexdigest()}


# --- lives ------------------------------------------------------------------------------------------------------------


def whole(name: str, folder: Path) -> None:
    """Train to the end."""
    _write(folder, js.fit(config_of(name), run=folder / "run", quiet=True))


def killed(name: str, folder: Path) -> None:
    """Train until just before step `KILLED`, then kill this process once the checkpoint of step `SAVED` exists."""
    take = loop.Loop._take

    def dies(self: Any, state: Any, done: int) -> Any:
        if done + 1 == KILLED:
            while SAVED not in self.checkpoints.steps():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, state, done)

    loop.Loop._take = dies  # type: ignore[method-assign]
    js.fit(config_of(name), run=folder / "run", quiet=True)


def resumed(name: str, folder: Path) -> None:
    """Resume, after building models, optimizers and layouts of other recipes."""
    others = [other for other in RECIPES if other != name]
    random.Random(os.environ["SEED"] + name).shuffle(others)
    for other in others[:3]:
        blueprint_of(config_of(other))[0].abstract_state()
    _write(folder, js.fit(config_of(name), run=folder / "run", resume=True, quiet=True))


def _write(folder: Path, run: js.Run) -> None:
    (folder / "digests.json").write_text(json.dumps(digests(run)))


def live(life: Callable[[str, Path], None], name: str, folder: Path) -> int:
    """Run a function in a process of its own; return its exit code, negative if killed."""
    folder.mkdir(parents=True, exist_ok=True)
    return lives.wait(lives.start(lambda: life(name, folder), 1, 8, folder / "log"))[0]


def compare(name: str, root: Path) -> dict[str, Any]:
    """Run the three processes of a recipe and compare their digests."""
    start = time.perf_counter()
    assert live(whole, name, root / "whole") == 0, (root / "whole" / "log").read_text()[-4000:]
    assert live(killed, name, root / "parts") == -signal.SIGKILL, (root / "parts" / "log").read_text()[-4000:]
    steps = js.Run(root / "parts" / "run", config_of(name)).checkpoints.steps()
    assert steps == [SAVED], steps
    assert live(resumed, name, root / "parts") == 0, (root / "parts" / "log").read_text()[-4000:]
    a, b = (json.loads((root / part / "digests.json").read_text()) for part in ("whole", "parts"))
    together = [hashlib.sha256(json.dumps(x, sort_keys=True).encode()).hexdigest() for x in (a, b)]
    return {
        "recipe": name,
        "layout": RECIPES[name]["layout"],
        "arrays": len(a) - 1,
        "different": sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k)),
        "sha256": [x[:16] for x in together],
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Compare every recipe that results/resume.json lacks, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="ignore earlier results")
    args = parser.parse_args()
    os.environ["SEED"] = str(args.seed)
    file = HERE / "results" / "resume.json"
    result = {"seed": args.seed, "jax": jax.__version__, "rows": []}
    if file.exists() and not args.again:
        before = json.loads(file.read_text())
        result = before if before["seed"] == args.seed and before["jax"] == jax.__version__ else result
    root = Path(tempfile.mkdtemp())
    lives.configure(root / "cache")
    rows = {row["recipe"]: row for row in result["rows"]}
    for name in RECIPES:
        if name not in rows:
            rows[name] = compare(name, root / name)
            shutil.rmtree(root / name)
            file.write_text(json.dumps(result | {"rows": list(rows.values())}, indent=1) + "\n")
        row = rows[name]
        same = "same bits" if not row["different"] else f"DIFFERENT: {row['different']}"
        print(f"{name:14} {row['layout']:20} {row['arrays']:4} arrays  {row['sha256'][0]}  {same}", flush=True)
    print(f"seed {args.seed}, jax {jax.__version__}: {sum(not r['different'] for r in rows.values())} of {len(rows)}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
