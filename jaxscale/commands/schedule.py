"""`jaxscale schedule`: draws a pipeline schedule."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, no_bindings
from jaxscale.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "schedule",
        help="draw a pipeline schedule",
        description="Draws a pipeline schedule with a line per stage and a column per tick. F3 is the forward pass of "
        "micro-batch 3 (F3.1: of chunk 1),\nB its backward pass, W its weight gradients where these are separate. Also "
        "prints the bubble, and for each stage the\nlargest number of micro-batches whose activations it stores.",
        formatter_class=TEXT,
    )
    parser.add_argument(
        "name", metavar="NAME", help="a schedule, such as 1f1b, or a .csv file (see docs/how_to/pipelines.md)"
    )
    parser.add_argument("--stages", type=int, default=4, help="(default 4)")
    parser.add_argument("--microbatches", type=int, help="(default 2 per stage)")
    parser.add_argument("--chunks", type=int, help="chunks of layers per stage (interleaved; default 2)")
    parser.add_argument("--csv", metavar="FILE", help="also write the schedule as a table that Layout.pipeline accepts")
    parser.add_argument("--plot", metavar="FILE", help="also draw a picture, such as schedule.png (needs matplotlib)")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Draw the schedule; returns the exit code 0."""
    no_bindings(args, bindings)
    from jaxscale.layout import Pipeline, simulate
    from jaxscale.layout.table import draw_figure, draw_text, to_csv

    for option in ("stages", "microbatches"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise ConfigError(f"--{option} {getattr(args, option)}: must be at least 1")
    pipeline = Pipeline(args.name, args.microbatches, args.chunks)
    table = pipeline.table(*pipeline.sizes_or(args.stages, 2 * args.stages))
    simulated = simulate(table)
    print(draw_text(table))
    work = ", ".join(("forward 1", "backward 2") if table.phases == 2 else ("F 1", "B 1", "W 1"))
    print(
        f"\n{table.name}: {table.stages} stages, {table.microbatches} micro-batches, {table.chunks} chunk(s), "
        f"{simulated.ticks} ticks\n"
        f"bubble {simulated.bubble:.3f} of each stage's time ({work}), if stages run independently\n"
        f"bubble {simulated.lockstep_bubble:.3f} if stages wait for each other in each phase (layers are also sharded "
        "over other mesh axes)\n"
        f"peak activations, in micro-batches{' x chunks' if table.chunks > 1 else ''}, by stage: "
        f"{', '.join(map(str, simulated.stash))}"
    )
    if args.csv is not None:
        Path(args.csv).write_text(to_csv(table))
    if args.plot is not None:
        draw_figure(table).savefig(args.plot)
    return 0
