"""The longest row that fits, for Llama 3 8B on named hardware, by each route: searched with the hardware's compiler.

    python experiments/long_context/longest.py                       # search cell by cell; resumes if interrupted
    python experiments/long_context/longest.py --hardware v5p-64     # only on this; --route ring: only by this
    python experiments/long_context/longest.py --table               # the README's table; --picture: longest.png

TPUs need `make install EXTRAS=tpu`, GPUs `EXTRAS=gpu-aot` and JAX_PLATFORMS=cpu (Python 3.12). The first length is the
longest by `jaxscale.plan`; lengths then double or halve until one fits and one does not, and the interval between them
is divided, at the length that their compiled bytes suggest. Every compilation is a process of its own with a time
limit, and a line of cells.jsonl as soon as it ends. A compiler is stopped once it has assigned all buffers, because
code generation takes most of its time and does not change memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CELLS = HERE / "cells.jsonl"
SEARCH = HERE.parent / "planner_accuracy"

HARDWARE = {"v5p-64": "v5p:2x4x4", "v6e-256": "v6e:16x16", "1 H200": "h200:1", "8 H200": "h200:8"}
"""Name -> topology. A v5p-64 has 64 cores, which are 32 chips."""

HOSTS = {"v5p": 448e9 / 4, "v6e": 1440e9 / 8}
"""Host memory of a chip, bytes: of the machine types ct5p-hightpu-4t and ct6e-standard-8t of Google Cloud."""

TILES = ("norm", "mlp_hidden")
STEPS = 16
"""Lengths are multiples of a sixteenth of the power of two below them, so that neighbours differ by 3% to 6%."""
NEAR = 1.13
"""A search ends when the shortest length that does not fit is at most this times the longest that does."""


@dataclasses.dataclass(frozen=True)
class Route:
    """A way to make rows longer.

    Args:
      attention: "flash", "ring", "ulysses" or "mixed" (all-to-all in groups of as many devices as divide the key heads,
        and a ring of groups).
      tiled: whether norms and feed-forward layers are computed in tiles, with the layers' inputs in host memory; the
        description of a GPU has none, so that these stay on the device there.
      recurrent: whether three of four layers are recurrent.
    """

    attention: str
    tiled: bool = False
    recurrent: bool = False


ROUTES = {
    "a row a device": Route("flash"),
    "the same, tiled": Route("flash", tiled=True),
    "ring": Route("ring"),
    "Ulysses": Route("ulysses"),
    "ring of Ulysses": Route("mixed"),
    "ring, tiled": Route("ring", tiled=True),
    "ring of Ulysses, tiled": Route("mixed", tiled=True),
    "ring, tiled, 3 of 4 layers recurrent": Route("ring", tiled=True, recurrent=True),
}
"""Name -> route."""

ORDER = (
    ("v5p-64", "ring"),
    ("v5p-64", "ring, tiled"),
    ("v5p-64", "ring of Ulysses"),
    ("1 H200", "a row a device"),
    ("1 H200", "the same, tiled"),
    ("v5p-64", "Ulysses"),
    ("8 H200", "ring, tiled"),
    ("v5p-64", "a row a device"),
    ("v5p-64", "ring, tiled, 3 of 4 layers recurrent"),
    ("v6e-256", "ring, tiled"),
    ("8 H200", "ring"),
    ("8 H200", "Ulysses"),
    ("v5p-64", "ring of Ulysses, tiled"),
    ("v6e-256", "ring"),
    ("8 H200", "ring of Ulysses"),
    ("v6e-256", "ring of Ulysses, tiled"),
    ("v6e-256", "Ulysses"),
    ("v6e-256", "ring, tiled, 3 of 4 layers recurrent"),
)
"""Cells (hardware, route), the most informative first."""


def config_of(hardware: str, route: str, seq_len: int) -> Any:
    """Return the config of a cell.

    On one GPU, where float32 weights with AdamW's states leave nothing, weights are bfloat16 and states 8 bits.

    Args:
      hardware: a key of `HARDWARE`.
      route: a key of `ROUTES`.
      seq_len: tokens of a row.
    """
    import jaxscale as js
    from jaxscale.hardware import topology
    from jaxscale.models import BlockConfig
    from jaxscale.models.presets import llama3_8b
    from jaxscale.nn import GatedDeltaNet, MemoryPolicy, RingAttention, UlyssesAttention, flash_attention
    from jaxscale.optim import AdamW, AdamW8bit

    way, target = ROUTES[route], topology(HARDWARE[hardware])
    n, tpu = target.devices, target.chip.platform == "tpu"
    together = {"flash": 1, "ulysses": min(n, 8)}.get(way.attention, n)  # devices of a row; 8 key heads
    groups = max(2, n // 8)
    kernel = {
        "flash": flash_attention,
        "ring": RingAttention(),
        "ulysses": UlyssesAttention(),
        "mixed": UlyssesAttention(ring=groups),
    }[way.attention]
    memory = MemoryPolicy(offload=("residual",) if tpu else (), tile=TILES if way.tiled else ())
    changes: dict[str, Any] = {"attention": kernel, "memory": memory if way.tiled else "full"}
    if way.recurrent:
        recurrent = BlockConfig(mixer=GatedDeltaNet())
        changes["blocks"] = (recurrent, recurrent, recurrent, BlockConfig())
    if n == 1:
        changes["param_dtype"] = "bfloat16"
    return js.TrainConfig(
        model=llama3_8b(**changes),
        layout=js.Layout(f"fsdp={n // together},context={together}", "fsdp_context"),
        batch_size=n // together,
        seq_len=seq_len,
        optimizer=AdamW8bit() if n == 1 else AdamW(),
        segments=False,
    )


def capacity(hardware: str) -> int:
    """Return the bytes that a program can use on a device."""
    from jaxscale.hardware import topology

    return topology(HARDWARE[hardware]).chip.capacity


# ---- lengths


def length(i: int) -> int:
    """Return the i-th length."""
    power, step = divmod(i, STEPS)
    return 2**power * (STEPS + step) // STEPS


def at_most(tokens: float) -> int:
    """Return the place of the longest length that does not exceed a number of tokens."""
    power = int(tokens).bit_length() - 1
    return power * STEPS + int(tokens * STEPS / 2**power) - STEPS


def following(
    sizes: Mapping[int, int | None], limit: int, guess: int, fixed: float = 0.0, most: int = 10**6
) -> int | None:
    """Return the place of the next length to compile, or `None` if the longest that fits is known.

    Args:
      sizes: compiled bytes by place; `None` is a compilation that failed, which counts as one that does not fit.
      limit: bytes that fit.
      guess: place of the first length.
      fixed: bytes that do not grow with the length, by the planner's estimate.
      most: place of the longest length for which host memory suffices.
    """
    fits = max((i for i, size in sizes.items() if size is not None and size <= limit), default=None)
    over = min((i for i, size in sizes.items() if size is None or size > limit), default=None)
    if fits is None and over is None:
        return min(guess, most)
    if fits == most:
        return None
    if fits is None or over is None:
        known: int = over if fits is None else fits  # type: ignore[assignment]
        size, many = sizes[known], len(sizes) > 1
        step = STEPS if many else STEPS // 4
        if size is not None and size > fixed and not many:
            by_size = at_most(length(known) * (limit - fixed) / (size - fixed))
            step = max(1, by_size - known if over is None else known - by_size)
        return known - step if fits is None else min(known + step, most)
    if length(over) <= NEAR * length(fits):
        return None
    low, high = sizes[fits], sizes[over]
    if low is None or high is None or high <= low:
        return (fits + over) // 2
    tokens = length(fits) + (length(over) - length(fits)) * (limit - low) / (high - low)
    return min(max(at_most(tokens), fits + 1), over - 1)


def guess_of(hardware: str, route: str) -> tuple[int, int]:
    """Return the place of the longest length that fits by the planner, and bytes that do not grow with the length."""
    from jaxscale.hardware import topology
    from jaxscale.plan import estimate
    from jaxscale.plan.by_tracing import traced_plan
    from jaxscale.plan.covered import NotCovered

    target, limit = topology(HARDWARE[hardware]), capacity(hardware)

    @functools.cache
    def size(place: int) -> int:
        config = config_of(hardware, route, length(place))
        try:
            return estimate(config, target).device
        except NotCovered:
            return traced_plan(config, target)[0].device

    fits, over = at_most(2**14), most_of(hardware, route) + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        fits, over = (middle, over) if size(middle) <= limit else (fits, middle)
    return fits, max(2 * size(fits - STEPS) - size(fits), 0)


def host_bytes(hardware: str, route: str, seq_len: int) -> int:
    """Return the bytes of layers' inputs in a device's share of host memory."""
    config = config_of(hardware, route, seq_len)
    if not ROUTES[route].tiled or "H200" in hardware:
        return 0
    model, devices = config.model, config.layout.sizes["context"] * config.layout.sizes["fsdp"]
    return 2 * model.depth * model.sizes.width * config.batch_size * seq_len // devices


def most_of(hardware: str, route: str) -> int:
    """Return the place of the longest length for which host memory suffices."""
    per_token = host_bytes(hardware, route, 2**20) / 2**20
    chip = HARDWARE[hardware].partition(":")[0]
    return at_most(HOSTS[chip] / per_token) if per_token else at_most(2**27)


# ---- compiling


def assigned(folder: Path) -> int | None:
    """Return bytes on a device, of arguments and temporaries, in the compiler's dump; `None` if there is none yet."""
    sys.path.insert(0, str(SEARCH))
    from memory import assigned

    return assigned(folder)


def compiled(command: list[str], folder: Path, limit_s: float, module: str = "jit_step") -> dict[str, Any]:
    """Run a command that compiles a program and prints its bytes as JSON; stop it once buffers are assigned.

    Args:
      command: what to run, in a process of its own.
      folder: where the compiler writes.
      limit_s: seconds after which the command is stopped.
      module: name of the program.

    Returns:
      `bytes` on a device (`None` if the compiler failed or ran out of time, with a reason in `error`), how they are
      known (`by`), and seconds.

    Raises:
      SystemExit: the process was ended from outside.
    """
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={module}"
    start, row, out = time.perf_counter(), {}, ""
    child = subprocess.Popen(
        command, env=os.environ | {"XLA_FLAGS": flags}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        while not row:
            try:
                out, _ = child.communicate(timeout=1)
            except subprocess.TimeoutExpired:
                if (size := assigned(folder)) is not None:
                    row = {"bytes": size, "by": "buffer assignment"}
                elif time.perf_counter() - start > limit_s:
                    row = {"bytes": None, "error": f"more than {limit_s:.0f} s"}
                continue
            last = out.strip().splitlines()[-1] if out.strip() else ""
            if child.returncode < 0:  # says nothing about the hardware
                raise SystemExit(
                    f"the compiler's process was ended by signal {-child.returncode}, as when this machine's memory is "
                    f"full; compile on a machine with more: {' '.join(command[2:])}"
                )
            row = json.loads(last) if child.returncode == 0 else {"bytes": None, "error": last[:300]}
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return row | {"seconds": round(time.perf_counter() - start)}


def live(folder: Path, count: int) -> list[tuple[int, str]]:
    """Return the largest arrays on a device at the peak of a compiled program: bytes, and shape and instruction.

    Args:
      folder: where a TPU's compiler wrote.
      count: most arrays to return.
    """
    text = next(folder.glob("*after_optimizations-live-range.txt")).read_text()
    program = next(folder.glob("*after_optimizations.txt")).read_text()
    peak = text.partition("(peak):")[2].partition("Stack trace")[0]
    rows = []
    for name, place, size in re.findall(r"^ *(\S+?)\{([\d,]*)\}: (\d+) bytes", peak, re.M):
        shapes = re.search(rf"^ *(?:ROOT )?%{re.escape(name)} = (.*?) [\w-]+\(", program, re.M)
        parts = re.findall(r"([a-z]+\d+\[[\d,]*\])(\{[^}]*\})?", shapes[1]) if shapes else []
        at = int(place.partition(",")[0] or 0)
        shape, layout = parts[at] if at < len(parts) else ("?", "")
        if "S(5)" not in layout:  # host memory
            rows.append((int(size), f"{shape} {name}"))
    return sorted(rows, reverse=True)[:count]


def compile_here(hardware: str, route: str, seq_len: int) -> None:
    """Compile a cell in this process, and print its bytes."""
    import jax

    from jaxscale.plan.compile import bytes_needed, bytes_of, compile_step

    config = config_of(hardware, route, seq_len)
    try:
        row = {"bytes": bytes_of(compile_step(config, HARDWARE[hardware])), "by": "program"}
    except jax.errors.JaxRuntimeError as e:
        row = {"bytes": bytes_needed(e), "by": "the compiler's error"}
    print(json.dumps(row))


def read() -> list[dict[str, Any]]:
    """Return all compiled cells."""
    return [json.loads(line) for line in CELLS.read_text().splitlines()] if CELLS.exists() else []


def search(hardware: str, route: str, limit_s: float, until: float, dumps: Path | None) -> None:
    """Search the longest row of a route; continue from the cells that are compiled."""
    import jax

    mine = [r for r in read() if (r["hardware"], r["route"]) == (hardware, route)]
    guess, fixed = (mine[0]["guess"], mine[0]["fixed"]) if mine else guess_of(hardware, route)
    most = most_of(hardware, route)
    sizes = {at_most(r["seq_len"]): r["bytes"] for r in mine}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    while time.time() < until and (place := following(sizes, capacity(hardware), guess, fixed, most)) is not None:
        command = [sys.executable, __file__, "--compile", hardware, route, str(length(place))]
        with tempfile.TemporaryDirectory() as scratch:
            to = Path(scratch) if dumps is None else dumps / "-".join(command[3:]).replace(" ", "_")
            row = compiled(command, to, limit_s)
        sizes[place] = row["bytes"]
        about = {"date": datetime.date.today().isoformat(), "commit": commit, "jax": jax.__version__}
        searched = {"seq_len": length(place), "guess": guess, "fixed": fixed}
        row = {"hardware": hardware, "route": route, **searched, **row, **about}
        with CELLS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


# ---- the page


def results() -> dict[tuple[str, str], dict[str, Any]]:
    """Return for each cell with compiled lengths: the longest that fits, the next that does not, the planner's."""
    out = {}
    for hardware, route in ORDER:
        rows = [r for r in read() if (r["hardware"], r["route"]) == (hardware, route)]
        fits = [r for r in rows if r["bytes"] is not None and r["bytes"] <= capacity(hardware)]
        over = [r for r in rows if r not in fits]
        if rows:
            out[hardware, route] = {
                "fits": max(fits, key=lambda r: r["seq_len"], default=None),
                "over": min(over, key=lambda r: r["seq_len"], default=None),
                "planned": length(rows[0]["guess"]),
                "count": len(rows),
                "jax": rows[-1]["jax"],
            }
    return out


def table() -> str:
    """Return the README's table."""
    out = [
        "| hardware | route | rows | fits | GiB a device | on host | does not fit | GiB | planned | programs | jax |"
    ]
    out += ["|" + "---|" * 11]

    def gib(n: int | None) -> str:
        return f"{n / 2**30:.1f}" if n else "–"

    for (hardware, route), r in results().items():
        fits, over, cells = r["fits"], r["over"], [hardware, route]
        tokens = fits["seq_len"] if fits else 0
        cells += [str(config_of(hardware, route, 2**20).batch_size), f"{tokens:,}", gib(fits and fits["bytes"])]
        cells += [gib(host_bytes(hardware, route, tokens)) if tokens else "–"]
        host = fits is not None and at_most(tokens) == most_of(hardware, route)
        longer = "its host is full" if host else f"{over['seq_len']:,}" if over else "–"
        cells += [longer, gib(over and over["bytes"]), f"{r['planned']:,}", str(r["count"]), r["jax"]]
        out += [f"| {' | '.join(cells)} |"]
    return "\n".join(out)


def picture() -> None:
    """Draw longest.png: bytes of every compiled program by length, and the memory of a device."""
    from matplotlib.figure import Figure

    colours = dict(zip(ROUTES, plt_colours(), strict=False))
    names = [h for h in HARDWARE if any(r["hardware"] == h for r in read())]
    figure = Figure(figsize=(4.2 * len(names), 4), dpi=110, layout="constrained")
    for ax, hardware in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for route, colour in colours.items():
            points = sorted(
                (r["seq_len"], r["bytes"] / 2**30)
                for r in read()
                if (r["hardware"], r["route"]) == (hardware, route) and r["bytes"] is not None
            )
            if points:
                ax.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=0.9, label=route)
        ax.axhline(capacity(hardware) / 2**30, color="black", linestyle=":", linewidth=0.8)
        ax.set(xscale="log", xlim=(1e5, 1e8), title=hardware, xlabel="tokens a row", ylabel="GiB a device, compiled")
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize=7)
    figure.savefig(HERE / "longest.png")


def plt_colours() -> list[str]:
    """Return a colour for each route."""
    return ["#b8b8b8", "#7a7a7a", "#3d7ea6", "#e0a458", "#6a994e", "#1b3a57", "#2f5d1e", "#d1495b"]


def main() -> None:
    """Search, or print the table, or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", choices=HARDWARE, help="only on this hardware")
    parser.add_argument("--route", choices=ROUTES, help="only by this route")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a compilation may take")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no compilation after this time")
    parser.add_argument("--dumps", type=Path, help="folder for the compiler's dumps, with a folder for each program")
    parser.add_argument("--table", action="store_true", help="only print the README's table")
    parser.add_argument("--picture", action="store_true", help="only draw longest.png")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_here(args.compile[0], args.compile[1], int(args.compile[2]))
    elif args.table:
        print(table())
    elif args.picture:
        picture()
    else:
        until = time.time() + 60 * args.minutes
        for hardware, route in ORDER:
            if args.hardware in (None, hardware) and args.route in (None, route):
                search(hardware, route, args.limit, until, args.dumps)


if __name__ == "__main__":
    main()
