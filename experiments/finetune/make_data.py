"""Make questions for fine-tuning a small code model: the type of a Python literal, as prompt and completion.

python experiments/finetune/make_data.py runs/finetune/types.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

LINES = 4000


def literal(draw: random.Random, depth: int = 0) -> object:
    """Return a random value; containers have up to three elements."""
    some = lambda: [literal(draw, depth + 1) for _ in range(draw.randint(1, 3))]  # noqa: E731
    simple = [
        lambda: draw.randint(-99, 999),
        lambda: round(draw.uniform(-9, 99), draw.randint(1, 3)),
        lambda: "".join(draw.choices("abcdefghijklmnopqrstuvwxyz_ 0123456789", k=draw.randint(1, 8))),
        lambda: draw.random() < 0.5,
        lambda: None,
    ]
    made = [lambda: some(), lambda: tuple(some()), lambda: {i: x for i, x in enumerate(some())}]
    return draw.choice(simple + made * (depth < 1))()


def main(out: str) -> None:
    """Write the questions to a JSON-lines file."""
    draw, lines = random.Random(0), set()
    while len(lines) < LINES:
        value = literal(draw)
        if len(repr(value)) < 40:
            lines.add(json.dumps({"prompt": f"type({value!r}) is ", "completion": type(value).__name__}))
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main(sys.argv[1])
