"""`jaxscale eval`: perplexity on texts, and multiple-choice questions."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.commands.shared import (
    TEXT,
    accept_argument,
    import_argument,
    layout_arguments,
    layout_of,
    say_bytes,
    weights_argument,
    weights_of,
)
from jaxscale.working_copy import as_named, file_to_write, upload_files

if TYPE_CHECKING:
    from jaxscale.infer.evaluate import Perplexity
    from jaxscale.run import Run


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "eval",
        help="perplexity of a trained model, and multiple-choice accuracy",
        description="Prints the perplexity on the run's held-out documents, or on text files, per token, byte and "
        "word. Longer documents are\ncut into segments of --length tokens, or with --stride into overlapping windows "
        "that start that many tokens apart, of\nwhich only new tokens count. The end-of-document token does not count."
        "\nWith --choices it prints the share of questions whose correct choice has the highest log-likelihood, plain "
        'and per\ncharacter. A line of the file is {"question": "...", "choices": ["...", "..."], "answer": 0}; '
        '"context" is accepted in place\nof "question", and the answer may be the choice itself.\nResults are written '
        "as JSON to a new file in RUN/eval.\n\n"
        "  jaxscale eval runs/demo-1\n"
        "  jaxscale eval runs/demo-1 book.txt notes.txt --length 256 --stride 128\n"
        "  jaxscale eval runs/demo-int4 --against runs/demo-1\n"
        '  jaxscale eval runs/demo-1 --choices quiz.jsonl --mesh "tensor=4" --devices 8',
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, such as runs/demo-1")
    texts = "text files, or .jsonl files with the key text in each line (default: the run's held-out documents)"
    parser.add_argument("files", metavar="FILE", nargs="*", help=texts)
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--choices", metavar="JSONL", help="multiple-choice questions, in place of texts")
    parser.add_argument("--separator", default=" ", help="text between a question and a choice (default: a space)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a segment or window (default: seq_len)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens between windows (default: --length, segments)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="rows of a batch (default 8)")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--against", metavar="RUN", help="also evaluate this run on the same texts, and print the difference"
    )
    parser.add_argument("--out", metavar="FILE", help="JSON file to write; it must not exist")
    weights_argument(parser)
    layout_arguments(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Evaluate, print and write the results; returns the exit code 0."""
    weights = weights_of(args, bindings)
    from jaxscale import load
    from jaxscale.errors import ConfigError
    from jaxscale.infer.choices import multiple_choice, read_questions
    from jaxscale.infer.evaluate import perplexity

    if args.choices is not None and args.files:
        raise ConfigError(f"--choices takes the place of text files; leave out {args.files[0]}")
    out = None if args.out is None else file_to_write(args.out)
    trained = load(args.run)
    say_bytes(trained, weights, args.weights)
    options: dict[str, Any] = {name: getattr(args, name) for name in ("length", "rows", "step")}
    options |= dict(layout=layout_of(args), weights=weights)
    if args.choices is not None:
        for name in ("stride", "against"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name} has no effect on --choices; leave it out")
        scores = multiple_choice(trained, read_questions(args.choices), separator=args.separator, **options)
        settings: dict[str, Any] = {"choices": args.choices, "separator": args.separator}
        for name in ("accuracy", "accuracy_normalised"):
            share, error = getattr(scores, name)
            about = f" ± {error:.4f}" if len(scores.right) > 1 else ""
            print(f"{name.replace('_', ', ')}: {share:.4f}{about} ({len(scores.right)} questions)")
        if scores.cut:
            print(
                f"{scores.cut} choices were longer than {scores.length} tokens; the beginning of their question was cut"
            )
        results = scores.results()
    else:
        texts = perplexity(trained, args.files or None, stride=args.stride, **options)
        settings = {"files": args.files or None}
        parts = "segments" if texts.stride == texts.length else f"windows every {texts.stride}"
        made = trained.info.get("quantized")  # such a run has its only checkpoint at step 0
        at = f"quantised at step {made['step']}" if made else f"step {texts.step}"
        print(f"{texts.documents} documents, {texts.tokens:,} tokens, {parts} of {texts.length}, {at}")
        print(f"perplexity per token {texts.per_token:.4f}")
        if texts.bytes:
            print(f"perplexity per byte {texts.per_byte:.4f} ({texts.bits_per_byte:.4f} bits)")
        if texts.words:
            print(f"perplexity per word {texts.per_word:.4f}")
        print(_speed(texts))
        results = texts.results()
        if args.against is not None:
            other = perplexity(
                load(args.against), args.files or None, stride=args.stride, **options | {"weights": None, "step": None}
            )
            if (other.tokens, other.documents, other.length) != (texts.tokens, texts.documents, texts.length):
                raise ConfigError(
                    f"--against {args.against} has other held-out documents, tokens or lengths; name text files and "
                    "--length"
                )
            gap = texts.nats / texts.tokens - other.nats / other.tokens
            print(f"{args.against}: perplexity per token {other.per_token:.4f}; {gap:+.4f} nats per token beside it")
            results |= {"against": args.against, "against_nats": other.nats, "gap_nats_per_token": gap}
        if weights is not None:
            before = perplexity(trained, args.files or None, stride=args.stride, **options | dict(weights=None))
            gap = (texts.nats - before.nats) / texts.tokens
            print(
                f"without --weights the perplexity per token is {before.per_token:.4f}; {args.weights} adds {gap:+.5f} "
                "nats per token to the loss"
            )
            results |= {"unquantised": before.results(), "nats_per_token_added": gap}
    settings |= {"mesh": args.mesh, "weights": None if weights is None else repr(weights)}
    print(f"written to {as_named(_written(trained, settings | results, args.choices, out))}")
    return 0


def _speed(texts: Perplexity) -> str:
    """Return tokens per second and bytes of parameters in one line."""
    from jaxscale.units import human_bytes

    rate = texts.tokens_per_second
    fast = "all in one batch, which also compiled" if rate is None else f"{rate:.4g} tokens/s after the first batch"
    return f"{fast}; {human_bytes(texts.parameters)} of parameters"


def _written(trained: Run, results: dict[str, Any], choices: str | None, out: Path | None) -> Path:
    """Write the results to a new file, and return it."""
    import jax

    from jaxscale.errors import RunError
    from jaxscale.version import __version__

    about = {
        "run": trained.info.get("id"),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"jaxscale": __version__, "jax": jax.__version__},
        "device": jax.devices()[0].device_kind,
    }
    name = "perplexity" if choices is None else f"choices-{Path(choices).stem}"
    folder = trained.path / "eval"
    names = [out] if out is not None else (folder / f"{name}-{n}.json" for n in range(1, 10**6))
    try:
        if out is None:
            folder.mkdir(exist_ok=True)
        for file in names:
            try:
                with file.open("x", encoding="utf-8") as f:
                    f.write(json.dumps(about | results, indent=2) + "\n")
                upload_files(file.parent, [file.name])
                return file
            except FileExistsError:
                continue
    except OSError as e:
        raise RunError(f"cannot write {out or folder}: {e.strerror}") from e
    raise RunError(f"{out or folder} exists already; name another file with --out")
