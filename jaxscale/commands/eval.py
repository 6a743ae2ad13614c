"""`jaxscale eval`: perplexity on texts, and questions with choices."""

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
    weights_argument,
    weights_of,
)

if TYPE_CHECKING:
    from jaxscale.run import Run


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "eval",
        help="perplexity of a trained model on texts, and questions with choices",
        description="Perplexity on the run's held-out documents, or on text files, per token, byte and word. Longer "
        "documents are taken in windows of --length tokens: segments side by side, or with --stride windows that begin "
        "so much later each, of which only what the one before did not reach counts. The end of a document does not "
        "count.\nWith --choices the share of questions whose right choice has the highest log-likelihood, as it is and "
        'over its length in characters. A line of the file is {"question": "...", "choices": ["...", "..."], '
        '"answer": 0}; "context" may stand for "question", and the answer may be the choice itself.\nResults are '
        "written as JSON into RUN/eval, each to a file of its own.\n\n"
        "  jaxscale eval runs/demo-1\n"
        "  jaxscale eval runs/demo-1 book.txt notes.txt --length 256 --stride 128\n"
        '  jaxscale eval runs/demo-1 --choices quiz.jsonl --mesh "tensor=4" --devices 8',
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, as runs/demo-1")
    texts = "text files, or .jsonl with a text a line under the key text (default: the run's held-out documents)"
    parser.add_argument("files", metavar="FILE", nargs="*", help=texts)
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--choices", metavar="JSONL", help="questions with choices, in place of texts")
    parser.add_argument("--separator", default=" ", help="stands between a question and a choice (default: a space)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens that the model sees at once (default: seq_len)")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens between windows (default: --length, segments)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="rows of a batch (default 8)")
    parser.add_argument("--step", type=int, metavar="N", help="of which checkpoint (default: the newest)")
    parser.add_argument("--out", metavar="FILE", help="where the JSON goes; must not be there")
    weights_argument(parser)
    layout_arguments(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    weights = weights_of(args, bindings)
    from jaxscale import load
    from jaxscale.errors import ConfigError
    from jaxscale.infer.choices import multiple_choice, read_questions
    from jaxscale.infer.evaluate import perplexity

    if args.choices is not None and args.files:
        raise ConfigError(f"--choices takes the place of text files; leave out {args.files[0]}")
    out = None if args.out is None else Path(args.out)
    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already; name another file with --out")
    trained = load(args.run)
    options: dict[str, Any] = {name: getattr(args, name) for name in ("length", "rows", "step")}
    options |= dict(layout=layout_of(args), weights=weights)
    if args.choices is not None:
        if args.stride is not None:
            raise ConfigError("--stride is of windows over texts; leave it out with --choices")
        found = multiple_choice(trained, read_questions(args.choices), separator=args.separator, **options)
        told: dict[str, Any] = {"choices": args.choices, "separator": args.separator}
        for name in ("accuracy", "accuracy_normalised"):
            share, error = getattr(found, name)
            about = f" ± {error:.4f}" if len(found.right) > 1 else ""
            print(f"{name.replace('_', ', ')}: {share:.4f}{about} ({len(found.right)} questions)")
        if found.cut:
            print(
                f"{found.cut} choices were longer than {found.length} tokens and lost the beginning of their question"
            )
        results = found.results()
    else:
        texts = perplexity(trained, args.files or None, stride=args.stride, **options)
        told = {"files": args.files or None}
        how = "segments" if texts.stride == texts.length else f"windows every {texts.stride}"
        print(f"{texts.documents} documents, {texts.tokens:,} tokens, {how} of {texts.length}, step {texts.step}")
        print(f"perplexity per token {texts.per_token:.4f}")
        if texts.bytes:
            print(f"perplexity per byte {texts.per_byte:.4f} ({texts.bits_per_byte:.4f} bits)")
        if texts.words:
            print(f"perplexity per word {texts.per_word:.4f}")
        results = texts.results()
    told |= {"mesh": args.mesh, "weights": None if weights is None else repr(weights)}
    print(f"written to {_written(trained, told | results, args.choices, out)}")
    return 0


def _written(trained: Run, results: dict[str, Any], choices: str | None, out: Path | None) -> Path:
    """Writes the results where nothing is yet."""
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
                return file
            except FileExistsError:
                continue
    except OSError as e:
        raise RunError(f"cannot write {out or folder}: {e.strerror}") from e
    raise RunError(f"{out or folder} is there already; name another file with --out")
