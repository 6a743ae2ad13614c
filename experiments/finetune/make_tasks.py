"""Make lines of four unlike tasks for fine-tuning a small code model.

python experiments/finetune/make_tasks.py runs/finetune/tasks.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

from make_data import literal

LINES = 8000


def word(draw: random.Random) -> str:
    """Return a random word of 2 to 5 letters."""
    return "".join(draw.choices("abcdefghij", k=draw.randint(2, 5)))


def typed(draw: random.Random) -> tuple[str, str]:
    """The type of a literal."""
    value = literal(draw)
    return f"type({value!r}) is ", type(value).__name__


def backwards(draw: random.Random) -> tuple[str, str]:
    """A word from its end."""
    text = word(draw)
    return f"'{text}'[::-1] == ", text[::-1]


def ordered(draw: random.Random) -> tuple[str, str]:
    """A word's letters in their order."""
    text = word(draw)
    return f"sorted('{text}') -> ", "".join(sorted(text))


def bigger(draw: random.Random) -> tuple[str, str]:
    """The larger of two numbers."""
    one, two = draw.randint(0, 99), draw.randint(0, 99)
    return f"max({one}, {two}) = ", str(max(one, two))


TASKS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (typed, backwards, ordered, bigger)


def main(out: str) -> None:
    """Write as many lines of each task to a JSON-lines file."""
    draw, lines = random.Random(0), set()
    while len(lines) < LINES:
        prompt, completion = TASKS[len(lines) % len(TASKS)](draw)
        if len(prompt) < 50:
            lines.add(json.dumps({"prompt": prompt, "completion": completion}))
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main(*sys.argv[1:])
