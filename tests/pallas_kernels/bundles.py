"""What the compiler schedules for attention's kernels on TPUs: bundles of a step, and the unit that bounds them.

    python -m tests.pallas_kernels.bundles            # writes pallas_kernels/BOUNDS.md (needs libtpu, no TPU)
    python -m tests.pallas_kernels.bundles --check    # compares with it: 1 if a kernel has 5% more bundles

A bundle is what a core issues in a cycle. libtpu writes the final schedule of every kernel if it is loaded with
`--xla_jf_dump_to`; a step on two tiles is a region of that schedule without loops or waits for copies, so its bundles
are its cycles.
"""

from __future__ import annotations

import argparse
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

from pallas_kernels import dispatch
from pallas_kernels.aot import compile_kernel
from pallas_kernels.flash_attention import Mask, examples, tpu
from pallas_kernels.gate import TPUS

TABLE = Path(dispatch.__file__).parent / "BOUNDS.md"
TILE, TOKENS, HEADS, KEY_HEADS, WIDTH = 1024, 4096, 4, 1, 128
WORSE = 1.05
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
RATED = ("v6e", "tpu7x")


def kernels() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield (name, function, shapes): attention's passes, and JAX's splash attention on the same arrays."""
    sizes: dict[str, Any] = {"b": 1, "s": TOKENS, "h": HEADS, "kv": KEY_HEADS, "d": WIDTH, "dv": WIDTH}
    splash = [jax.ShapeDtypeStruct((1, heads, TOKENS, WIDTH), "bfloat16") for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    for direction in ("forward", "backward"):
        yield (direction, *examples.case(tpu.run, direction, mask=Mask(causal=True), **sizes))
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


def steps(schedule: str) -> list[dict[str, int]]:
    """Return the regions of a kernel's final schedule that have matrix products: bundles and counted instructions."""
    regions: list[list[str]] = [[]]
    for line in schedule.splitlines():
        if bundle := re.match(r" *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *: ", line):
            if bundle[1]:  # a label: a jump may arrive here
                regions.append([])
            regions[-1].append(line)
    results = []
    for lines in regions:
        text = "\n".join(lines)
        if "vmatmul" in text:
            counts = {name: len(re.findall(code, text)) for name, code in INSTRUCTIONS.items()}
            results.append({"bundles": len(lines), **counts})
    return results


def row(name: str, chip: str, regions: list[dict[str, int]]) -> str:
    """Return a line of the table, from a kernel's regions with products."""
    full, partial = min(regions, key=lambda r: r["bundles"]), max(regions, key=lambda r: r["bundles"])
    least = {what: full[what] / rate for what, rate in RATES.items()}
    bound = max(least, key=lambda what: least[what])
    numbers = [full["bundles"], partial["bundles"], *(full[what] for what in INSTRUCTIONS)]
    bounds = [f"{bound}: {least[bound]:,.0f}", f"{least[bound] / full['bundles']:.2f}"] if chip in RATED else ["?", "?"]
    return f"| {' | '.join([name, chip, *(f'{n:,}' for n in numbers), *bounds])} |"


def rows(chip: str) -> Iterator[str]:
    """Compile for a chip in a new process, whose libtpu writes its schedules, and yield the table's lines."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
        command = [sys.executable, "-m", "tests.pallas_kernels.bundles", "--compile", chip, folder]
        done = subprocess.run(
            command, env={**os.environ, "LIBTPU_INIT_ARGS": flags}, check=True, stdout=subprocess.PIPE, text=True
        )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            for name, regions in json.loads(line).items():
                yield row(name, chip, regions)


def _compile(chip: str, folder: Path) -> None:
    """Print the regions of every kernel as a line of JSON."""
    for name, fn, shapes in kernels():
        compile_kernel(fn, *shapes, topology=chip)
        programs = []
        for path in sorted(folder.glob("*final_bundles.txt")):
            text = path.read_text()
            path.unlink()
            if "schedule-analysis" not in path.name and (regions := steps(text)):
                programs.append(regions)
        programs.sort(key=lambda regions: -regions[0]["results"])
        if name == "splash backward":
            programs = programs[:1]  # without the forward pass that it needs
        parts = [name] if len(programs) == 1 else [f"{name}, {part}" for part in ("keys", "queries")]
        print(json.dumps(dict(zip(parts, programs, strict=True))), flush=True)


def document() -> str:
    """Return the whole document."""
    import libtpu

    head = f"""# What bounds attention on TPUs

Generated by `python -m tests.pallas_kernels.bundles` with jax {jax.__version__} and libtpu {libtpu.__version__}, for
causal bfloat16 attention {WIDTH} wide: a step on {TILE:,} queries and {TILE:,} keys of one head, in the final schedule
of the compiler. *Bundles* are cycles of a core if nothing waits for memory; a step that masks has more (*masked*). The
other numbers are instructions of an unmasked step: registers of results from the matrix units (of 8 by 128 numbers),
registers of exponentials, of other arithmetic, and stores, of which some only because registers ran out (*spilled*).

*Bound* names the unit that needs the most cycles for its instructions alone, and the last column is its share of the
step: what a perfect overlap of all units could still gain. A core takes one register of exponentials and four of
arithmetic a cycle, and the matrix units of a v6e or TPU7x return one register of results. By data sheets those of
a v5e or v5p return half a register, but the compiler schedules more, so its bundles are fewer than cycles there, and no
bound is given.
*splash* is `jax.experimental.pallas.ops.tpu.splash_attention` with tiles of the same size. Nothing here was timed.

| kernel | TPU | bundles | masked | results | exps | arithmetic | stores | spilled | bound | of the step |
|---|---|---|---|---|---|---|---|---|---|---|
"""
    lines = [line for chip in TPUS for line in rows(chip)]
    return head + "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line.split(" | ")[0]))


def check() -> int:
    """Print how the bundles differ from the table's, and return 1 if a kernel has 5% more."""
    before = {key: n for key, n in map(_bundles, TABLE.read_text().splitlines()) if key}
    worse = 0
    for chip in TPUS:
        for line in rows(chip):
            key, n = _bundles(line)
            old = before.get(key, n)
            worse |= n > WORSE * old
            print(f"{', '.join(key):32s} {old:6,} -> {n:6,}  {n / old - 1:+.1%}")
    return int(worse)


def _bundles(line: str) -> tuple[tuple[str, ...], int]:
    cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
    if len(cells) < 3 or not cells[2].replace(",", "").isdigit():
        return (), 0
    return tuple(cells[:2]), int(cells[2].replace(",", ""))


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.pallas_kernels.bundles", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    parser.add_argument("--compile", nargs=2, metavar=("CHIP", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.compile:
        _compile(options.compile[0], Path(options.compile[1]))
        return 0
    if options.check:
        return check()
    TABLE.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
