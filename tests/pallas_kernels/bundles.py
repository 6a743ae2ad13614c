"""Steps of a TPU kernel: bundles of the compiler's final schedule, instructions, and bytes that are copied.

A bundle is what a core issues in a cycle. libtpu writes the final schedule of every kernel if it is loaded with
`--xla_jf_dump_to`; a region of that schedule without jumps or waits has as many cycles as bundles.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.aot import compile_kernel
from pallas_kernels.flash_attention import Mask, examples, tpu
from pallas_kernels.gate import configurations, operations

TILE, TOKENS, HEADS, KEY_HEADS, WIDTH = 1024, 4096, 4, 1, 128
INSTRUCTIONS = {
    "results": r"vpop\.f32\.m",
    "exps": r"(?:vexp2|vpow2)\.",
    "arithmetic": r"= v(?:add|sub|mul|max|min|cmp|sel|pack|and|or)\b",
    "stores": r" vst \[",
    "spills": r" vst \[vmem:\[#allocation\d+_spill",
}
"""What is counted -> its instruction. A result is a register that a matrix unit returns, of 8 by 128 numbers."""
RATES = {"results": 1, "exps": 1, "arithmetic": 4}
"""The most of each in a bundle of a v6e or TPU7x. Matrix units: the peak over clock and size of a result."""
HERTZ = {"v6e": 918e12 / (8 * 128 * 256 * 2), "tpu7x": 1153.5e12 / (8 * 128 * 256 * 2)}
"""Clock of a chip: its peak over the operations of a result, of which its matrix units return one a cycle."""
BYTES = {"v6e": 1.638e12, "tpu7x": 3.69e12}
"""Bytes a second of a chip's memory, a core's share (data sheets)."""
CASES = {
    "blockwise": ("adamw bfloat16 mlp, fsdp=8", "adamw float32 mlp, fsdp=8"),
    "chunked_recurrence": ("GLA bfloat16 forward",),
    "cut_cross_entropy": tuple(
        f"bfloat16 4096 ve 128256{kind} {direction}"
        for kind in ("", " entropy")
        for direction in ("forward", "backward")
    ),
    "decode_attention": ("bfloat16 128 contiguous", "bfloat16 128 pages of 16"),
    "fftconv": ("4096 tokens convolve", "4096 tokens spectrum"),
    "flash_attention": (),  # `attention` has them, beside JAX's kernels
    "grouped_experts": ("qwen3 hidden", "qwen3 gradients"),
    "grouped_matmul": ("qwen3 forward", "qwen3 input gradient", "qwen3 kernel gradient"),
    "grouped_stored_matmul": ("qwen3 int8", "qwen3 mxfp4"),
    "routed_experts": ("qwen3 256 tokens",),
    "softmax": ("bfloat16 32765 softmax", "bfloat16 32765 softmax_backward", "float32 262141 sums"),
    "stored_matmul": ("int4, groups of 128", "int8", "mxfp4", "int4, 1024 rows bfloat16"),
}
"""Configurations of the gate that the table has; of an op that is not here, the first one."""


def attention() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes): attention's passes, and JAX's splash attention on the same arrays."""
    sizes: dict[str, Any] = {"b": 1, "s": TOKENS, "h": HEADS, "kv": KEY_HEADS, "d": WIDTH, "dv": WIDTH}
    splash = [jax.ShapeDtypeStruct((1, heads, TOKENS, WIDTH), "bfloat16") for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    for direction in ("forward", "backward"):
        for name, dropout in ((direction, 0.0), (f"{direction} with dropout", 0.1)):
            yield (name, *examples.case(tpu.run, direction, mask=Mask(causal=True), dropout=dropout, **sizes))
        yield f"splash {direction}", functools.partial(_splash, direction == "backward"), tuple(splash)


def _splash(gradient: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    tiles: dict[str, Any] = {f"block_{name}": TILE for name in names}
    sizes = kernel.BlockSizes(**tiles, use_fused_bwd_kernel=True)
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    attention = jax.vmap(kernel.make_splash_mha(mask=mask, block_sizes=sizes, head_shards=1, q_seq_shards=1))
    if not gradient:
        return attention(q, k, v)
    y, pull = jax.vjp(attention, q, k, v)
    return pull(y)


def others() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes) of every other op's `CASES`."""
    for op in operations("tpu"):
        every = {name: (fn, shapes) for name, fn, shapes in configurations(op, "tpu")}
        for name in CASES.get(op, tuple(every)[:1]):
            yield (f"{op}: {name}", *every[name])


def regions(schedule: str) -> list[dict[str, int]]:
    """Return the regions of a kernel's final schedule: bundles, depth in loops, and counted instructions.

    Args:
      schedule: what libtpu writes.
    """
    every: list[list[tuple[int, str]]] = [[]]
    for line in schedule.splitlines():
        if bundle := re.match(r" *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *: *(>*)", line):
            if bundle[1]:  # a label: a jump may arrive here
                every.append([])
            every[-1].append((len(bundle[2]), line))
    results = []
    for lines in filter(None, every):
        text = "\n".join(line for _, line in lines)
        counts = {name: len(re.findall(code, text)) for name, code in INSTRUCTIONS.items()}
        copied = sum(map(int, re.findall(r"dma\.(?:hbm_to_vmem|vmem_to_hbm) \[.*?size_in_granules=\*/(\d+)", text)))
        products = int("vmatmul" in text)
        results.append({"bundles": len(lines), "depth": lines[0][0], **counts, "copied": 32 * copied, "mxu": products})
    return results


def steps(regions: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return the regions with matrix products.

    Args:
      regions: of a kernel.
    """
    return [region for region in regions if region["mxu"]]


def attention_row(name: str, chip: str, regions: list[dict[str, int]]) -> str:
    """Return a line of attention's table.

    Args:
      name: of the kernel.
      chip: its TPU.
      regions: of its schedule, those with products.
    """
    full, partial = min(regions, key=lambda r: r["bundles"]), max(regions, key=lambda r: r["bundles"])
    numbers = [full["bundles"], partial["bundles"], *(full[what] for what in INSTRUCTIONS)]
    return line(name, chip, numbers, full, {})


def other_row(name: str, chip: str, regions: list[dict[str, int]]) -> str:
    """Return a line of the other kernels' table, of the region that computes most.

    Args:
      name: of the kernel.
      chip: its TPU.
      regions: of its schedule.
    """
    step = max(regions, key=lambda r: sum(r[what] / rate for what, rate in RATES.items()))
    # The copies of one step, unless the region is a loop inside it.
    whole = step["depth"] <= min(r["depth"] for r in regions if r["copied"] or r is step)
    copied = sum(r["copied"] for r in regions) if whole else 0
    memory = {"memory": copied * HERTZ[chip] / BYTES[chip]} if copied and chip in HERTZ else {}
    return line(name, chip, [step["bundles"], *(step[what] for what in INSTRUCTIONS), copied // 1024], step, memory)


def line(name: str, chip: str, numbers: list[int], step: dict[str, int], more: dict[str, float]) -> str:
    """Return a line of a table, which ends with the unit that bounds a step, its cycles, and their share of the step.

    Args:
      name: of the kernel.
      chip: its TPU.
      numbers: of the columns before.
      step: bundles and instructions of a step.
      more: other units' cycles.
    """
    least = {what: step[what] / rate for what, rate in RATES.items()} | more
    bound = max(least, key=lambda what: least[what])
    share = least[bound] / step["bundles"]
    bounds = [f"{bound}: {least[bound]:,.0f}", f"{share:.2f}"] if chip in HERTZ else ["?", "?"]
    return f"| {' | '.join([name, chip, *(f'{n:,}' for n in numbers), *bounds])} |"


def rows(chip: str, only: str = "") -> Iterator[tuple[str, str]]:
    """Compile for a chip in a new process, whose libtpu writes its schedules; yield (table, line).

    Args:
      chip: a TPU generation.
      only: compile kernels whose name contains this.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
        command = [sys.executable, "-m", "tests.pallas_kernels.bundles", chip, folder, only]
        done = subprocess.run(
            command, env={**os.environ, "LIBTPU_INIT_ARGS": flags}, check=True, stdout=subprocess.PIPE, text=True
        )
    for text in done.stdout.splitlines():
        if text.startswith("["):
            table, name, matched = json.loads(text)
            yield table, (attention_row if table == "attention" else other_row)(name, chip, matched)


def _compile(chip: str, folder: Path, only: str) -> None:
    """Print each kernel's table, name and regions as a line of JSON."""
    for name, fn, shapes in (one for one in attention() if only in one[0]):
        programs = [matched for _, text in _programs(fn, shapes, chip, folder) if (matched := steps(regions(text)))]
        programs.sort(key=lambda regions: -regions[0]["results"])
        if name == "splash backward":
            programs = programs[:1]  # without the forward pass that it needs
        parts = [name] if len(programs) == 1 else [f"{name}, {part}" for part in ("keys", "queries")]
        for part, matched in zip(parts, programs, strict=True):
            print(json.dumps(["attention", part, matched]), flush=True)
    for name, fn, shapes in (one for one in others() if only in one[0]):
        every = _programs(fn, shapes, chip, folder, kernels=True)
        for n, (_, text) in enumerate(every):
            part = f", kernel {n + 1}" if len(every) > 1 else ""
            print(json.dumps(["others", name + part, regions(text)]), flush=True)


def _programs(
    fn: Callable[..., Any], shapes: tuple[Any, ...], chip: str, folder: Path, kernels: bool = False
) -> list[tuple[str, str]]:
    """Return the names and schedules of a function's programs; with `kernels`, of its Pallas kernels alone."""
    compiled = compile_kernel(fn, *shapes, topology=chip).as_text() or ""
    lines = (text for text in compiled.splitlines() if 'custom_call_target="tpu_custom_call"' in text)
    calls = [text.split(" = ")[0].removeprefix("  ROOT ").strip(" %") for text in lines]
    programs = []
    for path in sorted(folder.glob("*final_bundles.txt")):
        name = re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", path.name)
        if "schedule-analysis" not in path.name and (name in calls or not kernels):
            programs.append((name, path.read_text()))
    for path in folder.iterdir():
        path.unlink()
    return programs


if __name__ == "__main__":
    _compile(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
