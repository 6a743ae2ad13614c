"""`jaxscale sample`: continues texts with a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
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
    from jaxscale.infer.completion import Completion

_MOST = 400


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "sample",
        help="continue texts with a trained model",
        description="Continues a text with the newest checkpoint of a run, and prints it as it comes.\nSeveral, "
        'of --prompts FILE (a line each; of a .jsonl, its field "prompt") or -n, are computed side by side and '
        "printed one after the other; with --json a line of JSON each.\nA text may become longer than those that the "
        "model was trained on: rotary positions go on, learned ones end, and the text with them; either is said.\n"
        "Temperature, cuts and penalty are by default those of an imported checkpoint's generation_config.json.\n\n"
        '  jaxscale sample runs/demo-1 --prompt "def " --temperature 0.6 --top-p 0.9 --stop "\\n\\n"\n'
        '  jaxscale sample runs/demo-1 --prompts prompts.txt --json --mesh "tensor=4" --devices 8\n'
        "  jaxscale sample runs/large --draft runs/small --draft-tokens 6",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, as runs/demo-1")
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--prompt", help="text to continue (default: start a new document)")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, one a line; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="a prompt is what a user says; the chat template writes it")
    parser.add_argument("-n", "--n", type=int, default=1, help="texts of each prompt, with seeds from --seed on")
    parser.add_argument(
        "--tokens",
        "--max-tokens",
        type=int,
        metavar="N",
        help="how many to add (default: 400, or up to the length that the model was trained on)",
    )
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, help="sample among this many likeliest tokens; 0 is all")
    parser.add_argument("--top-p", type=float, help="among the likeliest that reach this probability")
    parser.add_argument("--min-p", type=float, help="among those of this share of the likeliest one's")
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1, tokens of the text become rarer"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help='end before this text; "\\n" is a new line'
    )
    parser.add_argument("--ignore-end", action="store_true", help="go on after the end of a text")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default 0)")
    parser.add_argument(
        "--logprobs", type=int, default=0, metavar="N", help="the N likeliest tokens of each, in --json"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each text")
    parser.add_argument("--step", type=int, metavar="N", help="of which checkpoint (default: the newest)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="texts under way at once (default 8)")
    parser.add_argument(
        "--draft", metavar="RUN", help="a run whose smaller model proposes tokens (speculative decoding)"
    )
    parser.add_argument("--draft-tokens", type=int, default=4, metavar="N", help="proposals of a round (default 4)")
    parser.add_argument(
        "--stream-layers",
        choices=("host", "disk"),
        metavar="FROM",
        help="for a model larger than the device's memory: its layers come one by one from the host's, or from disk",
    )
    weights_argument(parser)
    layout_arguments(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    weights = weights_of(args, bindings)
    from jaxscale import load
    from jaxscale.data import ChatTemplate
    from jaxscale.errors import ConfigError
    from jaxscale.infer.generate import pieces
    from jaxscale.infer.loaded import trained_length
    from jaxscale.infer.sampling import Sampling
    from jaxscale.interop.companions import CHOICE

    if args.prompt is not None and args.prompts is not None:
        raise ConfigError("--prompts takes the place of --prompt; leave out one of them")
    if args.chat and args.prompt is None and args.prompts is None:
        raise ConfigError("--chat answers a message; give one with --prompt, or several with --prompts")
    if args.n < 1:
        raise ConfigError(f"-n {args.n}: ask for at least 1 text")
    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows}: must be at least 1")
    if args.logprobs and not args.json:
        raise ConfigError("--logprobs shows in JSON alone; add --json")
    choice = {name: getattr(args, name) for name in CHOICE if getattr(args, name) is not None}
    if choice.get("top_k") == 0:
        choice["top_k"] = None
    settings = Sampling(
        max_tokens=_MOST if args.tokens is None else args.tokens,
        stop=tuple(_unescaped(s) for s in args.stop),
        seed=args.seed,
        ignore_end=args.ignore_end,
        logprobs=args.logprobs,
        **choice,
    )
    trained = load(args.run)
    settings = dataclasses.replace(settings, **_choice(trained, choice))
    each = [dataclasses.replace(settings, seed=(args.seed + i) % 2**32) for i in range(args.n)]
    prompts = [args.prompt or ""] if args.prompts is None else _read(args.prompts)
    template = ChatTemplate.read(trained.path / "hf") if args.chat else None
    tokenizer: Any = trained.tokenizer if args.chat else None
    ids_of = lambda p: (  # noqa: E731
        trained.prompt_ids(p) if template is None else template.ids([{"role": "user", "content": p}], tokenizer)
    )
    longest = trained_length(trained)
    room = lambda p: longest - len(ids_of(p))  # noqa: E731
    fits = lambda p, s: dataclasses.replace(s, max_tokens=max(1, min(_MOST, room(p)))) if args.tokens is None else s  # noqa: E731
    asked = [(p, fits(p, s)) for p in prompts for s in each]
    given = [p if template is None else ids_of(p).tolist() for p, _ in asked]
    layout = layout_of(args)
    options: dict[str, Any] = dict(layout=layout, step=args.step, rows=args.rows, draft_tokens=args.draft_tokens)
    options |= dict(stream_layers=args.stream_layers, weights=weights)
    draft = None if args.draft is None else load(args.draft)
    printer = _Printer([p if template is None or args.json else "" for p, _ in asked], args.json)
    for piece in pieces(trained, given, [s for _, s in asked], draft=draft, **options):
        printer.take(piece.prompt, piece.text, piece.completion)
    if draft is not None and not args.json:
        share = printer.last.acceptance or 0.0
        print(f"jaxscale: {share:.0%} of the draft's proposals were accepted", file=sys.stderr)
    return 0


def _choice(trained: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """How tokens are chosen: as asked, else as the checkpoint came with it, which is said."""
    own = trained.choice(but=asked)
    if asked.get("temperature", own.get("temperature")) == 0:  # nothing is cut off from the likeliest
        own = {name: value for name, value in own.items() if name in ("temperature", "repetition_penalty")}
    if own:
        told = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in own.items())
        print(f"jaxscale: {told}, of its generation_config.json", file=sys.stderr)
    return {"temperature": 0.8, **own, **asked}


class _Printer:
    """Prints texts in their order: the first that is not complete as it comes, the others when it is their turn."""

    def __init__(self, prompts: list[str], as_json: bool):
        self._prompts, self._json = prompts, as_json
        self._waiting = [""] * len(prompts)
        self._done: list[Completion | None] = [None] * len(prompts)
        self._at = -1
        self.last: Any = None

    def take(self, i: int, text: str, completion: Completion | None) -> None:
        """New text of one of them."""
        if self._at < 0:  # not before there is something to say
            self._next()
        self._done[i] = completion
        if self._json:
            self._waiting[i] = "" if completion is None else _as_json(self._prompts[i], completion)
        elif i == self._at:
            sys.stdout.write(text)
        else:
            self._waiting[i] += text
        while self._at < len(self._prompts) and self._done[self._at] is not None:
            self.last = self._done[self._at]
            if self._json:
                sys.stdout.write(self._waiting[self._at])
            sys.stdout.write("\n")
            self._next()
        sys.stdout.flush()

    def _next(self) -> None:
        self._at += 1
        if self._at < len(self._prompts) and not self._json:
            sys.stdout.write(("\n" if self._at else "") + self._prompts[self._at] + self._waiting[self._at])
            sys.stdout.flush()


def _as_json(prompt: str, found: Completion) -> str:
    row = {
        "prompt": prompt,
        "text": found.text,
        "finished": found.finished,
        "tokens": len(found.ids),
        "ids": found.ids,
        "logprobs": found.logprobs,
        "seconds": round(found.seconds, 4),
        "first_token": round(found.first_token, 4),
    }
    if any(found.top):
        row["top"] = found.top
    if found.acceptance is not None:
        row["acceptance"] = found.acceptance
    return json.dumps(row, ensure_ascii=False)


def _unescaped(text: str) -> str:
    """A shell has no easy way to write a new line."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _read(file: str) -> list[str]:
    """Prompts of a file.

    Raises:
      DataError: it cannot be read, or has none.
    """
    from jaxscale.errors import DataError

    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read the prompts {file} ({e}); give a UTF-8 file with a prompt a line") from None
    # not where Unicode sees the end of a line
    lines = [(n, line.removesuffix("\r")) for n, line in enumerate(content.split("\n"), 1) if line.strip("\r")]
    field = _field if file.endswith(".jsonl") else lambda line, where: line
    found = [field(line, f"{file}, line {n}") for n, line in lines]
    if not found:
        raise DataError(f"{file} has no prompt; write one a line")
    return found


def _field(line: str, where: str) -> str:
    from jaxscale.errors import DataError

    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise DataError(f'{where} is no JSON object with a text in its field "prompt"')
    return row["prompt"]
