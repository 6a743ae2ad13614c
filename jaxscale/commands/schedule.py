"""`jaxscale schedule`: draws a pipeline schedule."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, no_bindings
from jaxscale.errors import ConfigError


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "schedule",
        help="draw a pipeline schedule",
        description="Draws a pipeline schedule, a line per stage and a column per tick (F3 is the forward of "
        "micro-batch 3, F3.1 of its chunk 1; B its backward, W its weight gradients where those are apart), and says "
        "what it costs: its bubble, and how many micro-batches' activations each stage holds at most.",
        formatter_class=TEXT,
    )
    parser.add_argument("name", metavar="NAME", help="gpipe, 1f1b, interleaved, zb-h1, lockstep, lockstep-zb or a .csv")
    parser.add_argument("--stages", type=int, default=4, help="(default 4)")
    parser.add_argument("--microbatches", type=int, help="(default 2 per stage)")
    parser.add_argument("--chunks", type=int, help="pieces of the model per stage (interleaved; default 2)")
    parser.add_argument("--csv", metavar="FILE", help="also write the table, as Pipeline reads it")
    parser.add_argument("--plot", metavar="FILE", help="also draw it as a picture, as parser.png (needs matplotlib)")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    no_bindings(args, bindings)
    from jaxscale.layout import Pipeline, simulate
    from jaxscale.layout.table import draw_figure, draw_text, to_csv

    for option in ("stages", "microbatches"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise ConfigError(f"--{option} {getattr(args, option)}: must be at least 1")
    pipeline = Pipeline(args.name, args.microbatches, args.chunks)
    table = pipeline.table(*pipeline.sizes_or(args.stages, 2 * args.stages))
    found = simulate(table)
    print(draw_text(table))
    work = ", ".join(("forward 1", "backward 2") if table.phases == 2 else ("F 1", "B 1", "W 1"))
    print(
        f"\n{table.name}: {table.stages} stages, {table.microbatches} micro-batches, {table.chunks} chunk(s), "
        f"{found.ticks} ticks\n"
        f"bubble {found.bubble:.3f} of each stage's time ({work}), every stage on its own clock\n"
        f"bubble {found.lockstep_bubble:.3f} where stages wait for one another in each phase (layers split over "
        "devices as well)\n"
        f"peak activations, in micro-batches{' x chunks' if table.chunks > 1 else ''}, by stage: "
        f"{', '.join(map(str, found.stash))}"
    )
    if args.csv is not None:
        Path(args.csv).write_text(to_csv(table))
    if args.plot is not None:
        draw_figure(table).savefig(args.plot)
    return 0
