"""Put mistakes into every shipped gin file: each must cause an error or a warning that names it.

    python -m experiments.reliability.fuzz --seed 0 --mutations 300

One process, no data, no device, and nothing is compiled: only `config.load`, `config.call` and `jaxscale.step.check`
run, which `jaxscale train` and `jaxscale explain` run too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import re
import time
import types
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale import config as gin_config
from jaxscale.config_types import parameters, type_hints
from jaxscale.errors import JaxscaleError
from jaxscale.layout import Layout
from jaxscale.step import TrainConfig, check
from pallas_kernels.errors import KernelError

HERE = Path(__file__).parent
FILES = sorted(
    file
    for file, text in ((f, f.read_text()) for f in HERE.parent.glob("**/*.gin"))
    if "\nLayout.mesh = " in text and "\ntrain.objective = " not in text
)
LINE = re.compile(r"^([\w/]+)\.(\w+) = (.+)$")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A gin text with one mistake.

    Args:
      kind: kind of the mistake.
      file: name of the shipped file.
      text: the file's text with the mistake.
      words: a message that names the mistake contains at least one of these.
      change: the mistake as shown to people.
    """

    kind: str
    file: str
    text: str
    words: tuple[str, ...]
    change: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome, "error", "warning", "silent" or "traceback", the message, and whether it names the mistake."""

    outcome: str
    named: bool
    message: str

    @property
    def good(self) -> bool:
        """Return whether there was an error or a warning that names the mistake."""
        return self.outcome in ("error", "warning") and self.named


def ask(mutation: Mutation) -> Verdict:
    """Load and check a text, as a command does before it compiles."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("jaxscale")
    log.addHandler(handler)
    try:
        with gin_config.isolated():
            gin_config.load(bindings=[mutation.text])
            config = typing.cast(TrainConfig, gin_config.call("train"))
            messages += [f"nothing reads the binding {name}" for name in gin_config.unused()]
        if not messages:
            layout = None if config.layout is None else config.layout.abstract()
            check(dataclasses.replace(config, layout=layout))
        outcome = "warning" if messages else "silent"
    except (JaxscaleError, KernelError) as e:
        messages, outcome = [str(e)], "error"
    except Exception as e:  # what a user would see as a traceback
        messages, outcome = [f"{type(e).__name__}: {e}"], "traceback"
    finally:
        log.removeHandler(handler)
    text = " | ".join(messages)
    return Verdict(outcome, any(w in text for w in mutation.words), text)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def pool(file: Path, random_: random.Random) -> Iterator[Mutation]:
    """Yield every mistake that this experiment can make in a file, in no particular order."""
    text = file.read_text()
    lines = [m for line in text.splitlines() if (m := LINE.match(line))]
    model = next(m[3] for m in lines if (m[1], m[2]) == ("train", "model")).strip("@()")
    parts = {"train": TrainConfig, model: gin_config.registered()["Transformer"], "Layout": Layout}
    make = lambda kind, change, text, *words: Mutation(kind, file.name, text, words, change)  # noqa: E731
    plus = lambda kind, line, *words: make(kind, line, f"{text}\n{line}\n", *words)  # noqa: E731

    for m in lines:
        for old, rest in ((m[1], f".{m[2]} = {m[3]}"), (m[2], f" = {m[3]}")):
            new = misspelt(old, random_)
            line = f"{new}{rest}" if old == m[1] else f"{m[1]}.{new}{rest}"
            yield make("misspelt name", line, text.replace(m[0], line), new)
        if m[3].startswith("@"):
            new = misspelt(m[3].strip("@()"), random_)
            line = f"{m[1]}.{m[2]} = @{new}" + "()" * m[3].endswith("()")
            yield make("misspelt name", line, text.replace(m[0], line), new)
    for part, cls in parts.items():
        hints = type_hints(cls)
        for name in parameters(cls):
            new = misspelt(name, random_)
            yield plus("misspelt name", f"{part}.{new} = 1", new)
            for value in wrong_values(hints.get(name)):
                yield plus("wrong type", f"{part}.{name} = {value}", name)

    mesh = next(m[3] for m in lines if m[2] == "mesh").strip('"')
    for axis in re.findall(r"(\w+)=", mesh):
        for new in {misspelt(axis, random_) for _ in range(3)}:
            yield plus("unknown axis", f'Layout.mesh = "{mesh.replace(axis, new)}"', f"'{new}'")
    for new in ("fsdp_tensr", "zero4", "megatron"):
        yield plus("unknown axis", f"Layout.rules = '{new}'", new)

    for axis, size in (("tensor", 3), ("fsdp", 7), ("tensor", 11), ("data", 7), ("context", 5), ("pipeline", 61)):
        yield plus("indivisible size", f'Layout.mesh = "{axis}={size}"', str(size))
    for name, size in (("batch_size", 3), ("batch_size", 97), ("accumulate", 7), ("accumulate", 31)):
        yield plus("indivisible size", f"train.{name} = {size}", str(size))
    cut = (("hidden", 1001), ("vocab", 257)) if "tensor=" in mesh else ()  # sharded over tensor only
    for name, size in (("heads", 7), ("heads", 5), ("kv_heads", 3), ("width", 131), *cut):
        yield plus("indivisible size", f"{model}.{name} = {size}", str(size))

    used = {"train", "Transformer", "Layout", *re.findall(r"@(\w+)", text)}
    for name, obj in sorted(gin_config.registered().items()):
        fields = [p for p in parameters(obj).values() if p.default is not p.empty and _literal(p.default)]
        if name not in used and fields:
            field = random_.choice(fields)
            yield plus("a key nothing reads", f"{name}.{field.name} = {field.default!r}", f"{name}.{field.name}")
    for line in ("train_steps = 5", "elsewhere/Layout.mesh = 'data=2'", "batch = 16"):
        yield plus("a key nothing reads", line, line.split(" ")[0].split("/")[-1])

    steps = int(next(m[3] for m in lines if m[2] == "steps"))
    for line, word in no_effects(model, steps):
        yield plus("a flag without effect", line, word)


def no_effects(model: str, steps: int) -> list[tuple[str, str]]:
    """Return lines without effect in any of the files, each with a word that the warning has to contain."""
    eight_bit = "train.optimizer = @AdamW8bit()\nAdamW8bit.storage = @EightBit()"
    memory = f"{model}.memory = @MemoryPolicy()"
    return [
        ("train.balance_rate = 0.01", "train.balance_rate"),
        (f"train.eval_every = {steps + 1}", "train.eval_every"),
        ("train.eval_every = 10\ntrain.eval_batches = 0", "train.eval_every"),
        (f"train.checkpoint_every = {steps + 5}", "train.checkpoint_every"),
        ("train.checkpoint_every = 0\ntrain.keep = 5", "train.keep"),
        ("train.checkpoint_every = 0\ntrain.keep_every = 7", "train.keep_every"),
        (f"train.checkpoint_every = {steps - 1}\ntrain.keep_every = {steps - 2}", "train.keep_every"),
        ("train.data = @synthetic()\nsynthetic.vocab_size = 64\ntrain.tokenizer = @BPETokenizer()", "okenizer"),
        ("train.guards = (@SpikeGuard(),)\nSpikeGuard.window = 10000000", "SpikeGuard"),
        ("train.guards = (@StragglerGuard(),)", "StragglerGuard"),
        ("train.guards = (@FingerprintGuard(),)\nLayout.mesh = 'data=1'", "FingerprintGuard"),
        ("train.optimizer = @SGD()\nSGD.nesterov = True", "SGD.nesterov"),
        (f"{eight_bit}\nEightBit.min_size = 1000000000000", "AdamW8bit"),
        ("Layout.pipeline = '1f1b'", "Layout.pipeline"),
        ("Layout.pipeline = 'gpipe:4'", "Layout.pipeline"),
        ("Layout.mesh = 'data=2'\nLayout.sequence_sharded = True", "Layout.sequence_sharded"),
        (f"{model}.dense_mlp = @GELU", "Transformer.dense_mlp"),
        (f"{model}.dense_layers = 1", "Transformer.dense_layers"),
        (f"{model}.mlp_every = 2", "Transformer.mlp_every"),
        (f"{model}.local_positions = @Rotary()", "Transformer.local_positions"),
        (f"{model}.windows = (100000,)", "Transformer.windows"),
        (f"{model}.windows = ({', '.join(['None'] * 200)}, 4)", "Transformer.windows"),
        (f"{model}.qkv_bias = True\n{model}.bias = True", "Transformer.qkv_bias"),
        (f"Layout.sequence_sharded = False\n{model}.overlap = ('attention',)", "overlap"),
        (f"{memory}\nMemoryPolicy.tile_size = 64", "MemoryPolicy.tile_size"),
        (f"{memory}\nMemoryPolicy.rest = 'keep'\nMemoryPolicy.keep = ('qkv',)", "MemoryPolicy.keep"),
        (f"{memory}\nMemoryPolicy.tile = ('norm',)\nMemoryPolicy.tile_size = 100000", "MemoryPolicy.tile"),
    ]  # fmt: skip


def misspelt(word: str, random_: random.Random) -> str:
    """Return a word with two letters exchanged, one left out or one doubled."""
    while True:
        i = random_.randrange(len(word))
        new = random_.choice((
            word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :],
            word[:i] + word[i + 1 :],
            word[: i + 1] + word[i:],
        ))  # fmt: skip
        if new != word and new.isidentifier():
            return new


def wrong_values(hint: Any) -> list[str]:
    """Return gin literals that an annotation does not allow."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = {typing.get_origin(o) or o for o in options}
    wrong = [] if str in kinds else ["'x'"]
    wrong += [] if kinds & {int, float} else ["12"]
    wrong += ["1.5"] if int in kinds and float not in kinds else []
    wrong += [] if kinds & {dict, Any} else ["{'a': 1}"]
    return wrong


def _literal(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


# --- the table --------------------------------------------------------------------------------------------------------


def chosen(count: int, seed: int) -> list[Mutation]:
    """Return `count` mistakes, spread as evenly as possible over kinds and files."""
    random_ = random.Random(seed)
    by_kind: dict[tuple[str, str], list[Mutation]] = {}
    for file in FILES:
        for one in pool(file, random_):
            by_kind.setdefault((one.kind, one.file), []).append(one)
    for mistakes in by_kind.values():
        random_.shuffle(mistakes)
    picked: list[Mutation] = []
    while len(picked) < count and any(by_kind.values()):
        for mistakes in by_kind.values():
            picked += [mistakes.pop()] if mistakes and len(picked) < count else []
    return picked


def main() -> None:
    """Check all mistakes, print a table and write results/fuzz.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=300)
    args = parser.parse_args()
    start = time.perf_counter()
    for file in FILES:  # as shipped, they cause no warning
        sound = ask(Mutation("none", file.name, file.read_text(), (), "none"))
        assert sound.outcome == "silent", (file, sound)
    verdicts = [(m, ask(m)) for m in chosen(args.mutations, args.seed)]
    seconds = time.perf_counter() - start
    table: dict[str, Counter[str]] = {}
    for mutation, verdict in verdicts:
        table.setdefault(mutation.kind, Counter())[
            verdict.outcome if verdict.named else f"{verdict.outcome}, unnamed"
        ] += 1
        if not verdict.good:
            print(f"{mutation.file}: {mutation.kind}: {mutation.change!r}: {verdict.outcome}: {verdict.message[:300]}")
    for kind, counts in table.items():
        print(f"{kind:24} {dict(counts)}")
    bad = sum(not v.good for _, v in verdicts)
    print(f"seed {args.seed}: {len(verdicts)} mistakes in {len(FILES)} files, {bad} not named, {seconds:.1f} s")
    result = {"seed": args.seed, "mutations": len(verdicts), "not_named": bad, "seconds": round(seconds, 1)}
    result |= {"kinds": {kind: dict(counts) for kind, counts in table.items()}}
    (HERE / "results" / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
