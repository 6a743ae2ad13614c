"""One training step of `train_gpu.py`, in a process of its own: planned, compiled, run, traced.

The step is the toolkit's own: a preset, `TrainConfig`, the memory policy that `jaxscale.plan.choose` selects for the
device's memory, and the program that `choose` compiled. On a CPU the same code trains toy models.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure
import numpy as np
import trace_summary
from step_flops import document_lengths, model_flops, palm_flops

from jaxscale.nn import POLICIES
from jaxscale.step import NextToken

TIMED_SECONDS = 20.0
"""Time for the timed steps of a case together; at least three are timed."""
TRACED = 3
PRODUCTS = 10
"""Matrix products between two steps; together they take several milliseconds."""
TOY_SHRINKS = 16
"""Rows of a toy model are this many times shorter."""
TOY = {"depth": 2, "vocab": 1024, "width": 128, "heads": 2, "kv_heads": 2, "head_dim": 64, "hidden": 256}
TOY_BYTES = 80 * 2**20
RESERVED = 2**30
"""Bytes of the device that the step may not use: they are for the matrix products and the trace."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch.

    Args:
      preset: name of a model of `jaxscale.models`.
      seq: tokens of a row.
      packed: whether a row has several documents, each of half to one and a half times an eighth of the row, with
        attention within documents; else a row is one document.
      rows: numbers of batch rows to choose from.
      depths: numbers of layers to choose from, largest first; the first that fits is used.
      policies: memory policies to choose from; all by default.
    """

    preset: str
    seq: int
    packed: bool
    rows: tuple[int, ...]
    depths: tuple[int, ...]
    policies: tuple[str, ...] = tuple(POLICIES)


SMALL, LARGE = ("sheared_llama_1_3b", (24, 12)), ("llama3_8b", (32, 24, 16, 8))
CASES = {
    "1.3B 4k": Case(SMALL[0], 4096, False, (4, 2, 1), SMALL[1]),
    "8B 4k": Case(LARGE[0], 4096, False, (4, 2, 1), LARGE[1]),
    "1.3B 32k packed": Case(SMALL[0], 32768, True, (1,), SMALL[1]),
    "8B 32k packed": Case(LARGE[0], 32768, True, (1,), LARGE[1]),
    "1.3B 4k none": Case(SMALL[0], 4096, False, (4, 2, 1), SMALL[1], ("none",)),
    "1.3B 4k packed": Case(SMALL[0], 4096, True, (4, 2, 1), SMALL[1]),
}


# ---- the step


def config_of(case: Case, depth: int, rows: int, *, toy: bool, xla: bool) -> Any:
    """Return the config of the run, as a user writes it.

    Args:
      case: model and batch.
      depth: number of layers.
      rows: number of batch rows.
      toy: whether to use sizes for a CPU.
      xla: whether to use XLA for all ops instead of our kernels.
    """
    import jaxscale as js
    from jaxscale.nn import flash_attention
    from jaxscale.optim import AdamW8bit, Constant
    from jaxscale.step import CutLoss

    implementation = "xla" if xla else None
    attention = functools.partial(flash_attention, implementation=implementation) if xla else flash_attention
    sizes: dict[str, Any] = TOY if toy else {"depth": depth}
    model = getattr(js.models, case.preset)(param_dtype="bfloat16", attention=attention, **sizes)
    seq = case.seq // TOY_SHRINKS if toy else case.seq
    document = max(16, seq // 8)
    return js.TrainConfig(
        model=model,
        data=js.data.synthetic(model.vocab, documents=8 + 16 * rows * seq // document, length=document, heldout=0.01),
        layout=js.Layout("data=1"),
        optimizer=AdamW8bit(implementation=implementation),
        objective=NextToken(loss=CutLoss(implementation=implementation)),
        segments=case.packed,
        batch_size=rows,
        seq_len=seq,
        steps=200,
        lr=3e-5,  # without a warm-up
        schedule=Constant(),
        eval_batches=0,
    )


def planned(case: Case, topology: str, budget: int, *, toy: bool, xla: bool) -> Any:
    """Return the config with the most layers that fits by the planner's estimate, and with the least recomputation.

    Raises:
      RuntimeError: no depth, number of rows and memory policy fits.
    """
    from jaxscale.plan import estimate

    for depth in case.depths:
        fitting = []
        for rows in case.rows:
            config = config_of(case, depth, rows, toy=toy, xla=xla)
            for name in case.policies:
                plan = estimate(
                    dataclasses.replace(config, model=dataclasses.replace(config.model, memory=name)), topology
                )
                if plan.device <= budget:
                    fitting.append((round(plan.extra_flops, 2), -rows, config))
        if fitting:
            return min(fitting, key=lambda f: f[:2])[2]
    raise RuntimeError(f"RESOURCE_EXHAUSTED by arithmetic: nothing of {case} fits {budget:,} bytes")


class Step:
    """The compiled step and its training state; a call takes a step and waits for its loss.

    Args:
      config: of `config_of`.
      topology: the planner's name of the present device.
      budget: bytes that the step may use.
      policies: memory policies to choose from.
    """

    def __init__(self, config: Any, topology: str, budget: int, policies: Sequence[str] = tuple(POLICIES)):
        from jaxscale.plan import choose
        from jaxscale.step import prepare
        from pallas_kernels.dispatch import choosing

        start = time.perf_counter()
        with choosing() as made:
            named = {name: POLICIES[name] for name in policies}
            self.choice = choose(config, topology, budget, policies=named, here=True)
        self.compile_seconds = time.perf_counter() - start
        self.ops = list(dict.fromkeys(map(str, made.values())))
        self.runs = ", ".join(dict.fromkeys(f"{c.op} {c.implementation}" for c in made.values()))
        self.config = self.choice.config
        ready = prepare(self.config)
        with self.config.layout:
            self.state = ready.blueprint.init(0)
            host = ready.loader.batch_at(0)
            self.batch = ready.place(lambda _: host, 0)
        tokens = host["tokens"]
        lengths = document_lengths(host["segment_ids"]) if config.segments else [tokens.shape[1]] * tokens.shape[0]
        self.tokens, self.lengths, self.host = tokens.size, lengths, host
        self.losses: list[float] = []
        self.norms: list[float] = []

    def __call__(self) -> None:
        """Take a step."""
        with self.config.layout:
            self.state, metrics = self.choice.program(self.state, self.batch)
        self.losses.append(float(metrics["loss"]))
        self.norms.append(float(metrics["grad_norm"]))

    def facts(self) -> dict[str, Any]:
        """Return the chosen sizes, memory policy and ops, and the planned memory."""
        from jaxscale.plan.compile import bytes_of

        model, memory = self.config.model, self.choice.program.memory_analysis()
        row = next(r for r in self.choice.rows if r.verdict == "chosen")
        return {
            "preset": model.sizes.__dict__ | {"depth": model.depth, "vocab": model.vocab, "dtype": model.param_dtype},
            "parameters": model.param_count(),
            "rows": self.config.batch_size,
            "seq": self.config.seq_len,
            "tokens_per_step": self.tokens,
            "documents": {"count": len(self.lengths), "shortest": min(self.lengths), "longest": max(self.lengths)},
            "policy": self.choice.policy,
            "policies": {r.policy: {"bytes": r.estimate.device, "verdict": r.verdict} for r in self.choice.rows},
            "compile_seconds": self.compile_seconds,
            "compiled_programs": sum(r.compiled_bytes is not None for r in self.choice.rows),
            "ops": self.ops,
            "runs": self.runs,
            "memory": {
                "planned": row.estimate.device,
                "compiled": bytes_of(self.choice.program),
                "compiled_temporaries": memory.temp_size_in_bytes,
                "budget": self.choice.budget,
            },
        }

    def trains(self) -> bool:
        """Return whether the loss of the one batch, taken again and again, fell.

        Raises:
          RuntimeError: a loss is not finite.
        """
        if not np.isfinite(self.losses).all():
            raise RuntimeError(f"a loss is not finite: {self.losses[:3]} … {self.losses[-1]}")
        return self.losses[-1] < self.losses[0]


# ---- measuring


@dataclasses.dataclass(frozen=True)
class Device:
    """The present device: JAX's name, the planner's name, bytes that programs may use, whether models are toys."""

    kind: str
    topology: str
    budget: int
    toy: bool

    @classmethod
    def here(cls, share: float = 1.0) -> Device:
        """Return the first device, with `share` of its memory.

        Raises:
          RuntimeError: `jaxscale.hardware` does not know the accelerator.
        """
        import jax

        from jaxscale.hardware import chip_of

        device = jax.devices()[0]
        if device.platform == "cpu":
            return cls(device.device_kind, "cpu", int(share * TOY_BYTES), True)
        chip = chip_of(device.device_kind)
        if chip is None:
            raise RuntimeError(f"jaxscale.hardware does not know '{device.device_kind}'")
        limit = (device.memory_stats() or {}).get("bytes_limit", chip.capacity)
        return cls(device.device_kind, chip.name, int(share * (limit - RESERVED)), False)


def measured(name: str, device: Device, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a case: the step timed in turns with matrix products, its memory, its trace."""
    from jaxscale.hardware import chip_of

    case = CASES[name]
    config = planned(case, device.topology, device.budget, toy=device.toy, xla=args.xla)
    step = Step(config, device.topology, device.budget, case.policies)
    row = step.facts() | {"peak_bytes_before_steps": peak_bytes()}
    if args.values is not None:
        save_values(args.values, step)
    step()  # the first step loads libraries on the device
    start = time.perf_counter()
    step()
    rounds = int(np.clip(TIMED_SECONDS / (time.perf_counter() - start), 3, args.rounds))
    row["memory"]["peak"] = peak_bytes()
    size, products = matmuls(512 if device.toy else 8192)
    timed = measure.interleaved({"step": step, "matmul": products}, rounds, warmup=1)
    trains = step.trains()
    seconds, matmul = timed["step"].wall, [2 * size**3 * PRODUCTS / s for s in timed["matmul"].wall]
    model = step.config.model
    chip = chip_of(device.kind)
    counted = {
        "causal": model_flops(model, step.tokens, step.lengths),
        "palm": palm_flops(model, step.tokens, step.config.seq_len),
    }
    row |= {
        "device": device.kind,
        "tokens_per_second": spread([step.tokens / s for s in seconds]),
        "step_seconds": seconds,
        "flops_per_step": counted,
        "tflops": {n: f / statistics.median(seconds) / 1e12 for n, f in counted.items()},
        "share_of_datasheet": {
            n: f / statistics.median(seconds) / chip.flops["bfloat16"] for n, f in counted.items() if chip is not None
        },
        "share_of_matmul": {
            n: dataclasses.asdict(measure.ratio([f / s for s in seconds], matmul)) for n, f in counted.items()
        },
        "matmul_tflops": statistics.median(matmul) / 1e12,
        "losses": step.losses,
        "trains": trains,
        "grad_norm": step.norms[0],
        "trace": {"problem": "the process ended while it was traced"},
    }
    args.into.write_text(json.dumps(row))  # saved first, since a profiler can kill the process
    return row | {"trace": traced(step)}


def long_step(seq: int, device: Device, args: argparse.Namespace) -> dict[str, Any]:
    """Train the large model on one row of `seq` tokens, for one step, or up to three where steps are quick."""
    case = dataclasses.replace(CASES["8B 4k"], seq=seq * (TOY_SHRINKS if device.toy else 1), rows=(1,))
    config = config_of(case, case.depths[0], 1, toy=device.toy, xla=args.xla)
    step = Step(config, device.topology, device.budget)
    seconds = []
    while not seconds or (len(seconds) < 3 and sum(seconds) < 30):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    if not np.isfinite(step.losses).all():
        raise RuntimeError(f"the loss at {seq} tokens is {step.losses}")
    row = step.facts() | {"step_seconds": seconds, "losses": step.losses}
    row["memory"]["peak"] = peak_bytes()
    return row | {"tokens_per_second": step.tokens / min(seconds)}


def matmuls(size: int) -> tuple[int, Callable[[], None]]:
    """Return (size, function that multiplies bfloat16 squares); random, as zeros draw less power and run faster."""
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in (0, 1))
    product = jax.jit(jnp.matmul)

    def run() -> None:
        jax.block_until_ready([product(a, b) for _ in range(PRODUCTS)][-1])

    return size, run


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "low": low, "high": high}


def peak_bytes() -> int | None:
    """Return the most bytes allocated on the device since this process began; `None` on a CPU."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def traced(step: Step) -> dict[str, Any]:
    """Profile a few more steps and return the summary, or the reason why that failed."""
    import jax

    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(TRACED):
                    step()
            return trace_summary.summarise(Path(folder), step.choice.program.as_text(), TRACED)
    except Exception as e:  # the row is worth keeping without a trace
        return {"problem": f"{type(e).__name__}: {e}"[:300]}


def save_values(folder: Path, step: Step) -> None:
    """Save the initial weights and the batch for `torch_llama.py`: one file of 16-bit words or float32 a tensor."""
    params = step.state.params
    block = params["runs"][0]["blocks"][0]
    layers = {
        **{n: block[n]["scale"] for n in ("attn_norm", "mlp_norm")},
        **{n: block["attn"][n]["kernel"] for n in ("q", "k", "v", "out")},
        **{n: block["mlp"][n]["kernel"] for n in ("gate", "up", "down")},
    }
    ends = {"embed": params["embed"]["weight"], "norm": params["norm"]["scale"], "head": params["head"]["weight"]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (layers | ends).items():
        array = np.asarray(value)
        np.save(folder / f"{name}.npy", array.view(np.uint16) if array.dtype.itemsize == 2 else array)
    for name in ("tokens", "targets"):
        np.save(folder / f"{name}.npy", step.host[name])


def main() -> None:
    """Run one case in this process and write the row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", required=True, help=f"one of {', '.join(CASES)}, or a number of tokens, or 'device'")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--values", type=Path, help="folder to save the initial weights and the batch in")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--share", type=float, default=1.0, help="share of the device's memory to use")
    parser.add_argument("--xla", action="store_true", help="use XLA for all ops instead of our kernels")
    args = parser.parse_args()
    try:
        device = Device.here(args.share)
        if args.case == "device":
            row = dataclasses.asdict(device)
        elif args.case.isdigit():
            row = long_step(int(args.case), device, args)
        else:
            row = measured(args.case, device, args)
    except Exception as e:  # the parent reports it, and continues with the next case
        traceback.print_exc()
        row = {"problem": f"{type(e).__name__}: {e}"[:1000]}
    args.into.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
