"""`jaxscale sample`: generates text with a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.commands.shared import (
    TEXT,
    accept_argument,
    cache_argument,
    cache_of,
    draft_arguments,
    draft_of,
    import_argument,
    layout_arguments,
    layout_of,
    say_bytes,
    weights_argument,
    weights_of,
)

if TYPE_CHECKING:
    from jaxscale.infer.completion import Completion

_MOST = 400


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "sample",
        help="generate text with a trained model",
        description="Continues a prompt with the newest checkpoint of a run, and prints tokens as they are generated."
        '\nSeveral prompts (--prompts FILE, one per line, or the field "prompt" of each line of a .jsonl) or several '
        "completions (-n)\nare generated as a batch and printed one after the other; with --json one JSON line each.\n"
        "A sequence may get longer than those in training: rotary positions extrapolate; with learned positions it "
        "ends at\nthe last one. Both print a note. Temperature, top-k, top-p and penalty default to the "
        "generation_config.json of an\nimported checkpoint.\n\n"
        '  jaxscale sample runs/demo-1 --prompt "def " --temperature 0.6 --top-p 0.9 --stop "\\n\\n"\n'
        '  jaxscale sample runs/demo-1 --prompts prompts.txt --json --mesh "tensor=4" --devices 8\n'
        "  jaxscale sample runs/large --draft runs/small --draft-tokens 6",
        formatter_class=TEXT,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, such as runs/demo-1")
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--prompt", help="text to continue (default: start a new document)")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, one per line; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="prompts are user messages, formatted by the chat template")
    parser.add_argument("-n", "--n", type=int, default=1, help="completions per prompt, with seeds from --seed on")
    parser.add_argument(
        "--tokens",
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens to generate (default: 400, or up to the sequence length in training)",
    )
    parser.add_argument("--temperature", type=float, help="0 takes the most likely token (default 0.8)")
    parser.add_argument("--top-k", type=int, help="sample from this many most likely tokens; 0 means all")
    parser.add_argument("--top-p", type=float, help="sample from the most likely tokens with this total probability")
    parser.add_argument("--min-p", type=float, help="sample from tokens with this share of the highest probability")
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1, makes tokens of the sequence less likely"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help='end before this text; "\\n" is a new line'
    )
    parser.add_argument("--ignore-end", action="store_true", help="continue after the end-of-text token")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--logprobs", type=int, default=0, metavar="N", help="add the N most likely tokens at each place (--json)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON line for each completion")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="sequences generated at once (default 8)")
    draft_arguments(parser)
    parser.add_argument(
        "--stream-layers",
        metavar="FROM",
        help="for models larger than device memory: load layers one at a time from host memory or from disk; "
        "host:4 has four layers on the device, not two",
    )
    weights_argument(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="afterwards generate again with --weights and without, and print tokens per second and bytes of both",
    )
    cache_argument(parser)
    layout_arguments(parser)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Generate and print; returns the exit code 0."""
    weights = weights_of(args, bindings)
    from jaxscale import load
    from jaxscale.data import ChatTemplate
    from jaxscale.errors import ConfigError
    from jaxscale.infer.cache import Paged
    from jaxscale.infer.generate import pieces
    from jaxscale.infer.loaded import trained_length
    from jaxscale.infer.sampling import Sampling
    from jaxscale.interop.companions import CHOICE

    if args.prompt is not None and args.prompts is not None:
        raise ConfigError("--prompts takes the place of --prompt; leave out one of them")
    if args.chat and args.prompt is None and args.prompts is None:
        raise ConfigError("--chat answers a message; give one with --prompt, or several with --prompts")
    if args.n < 1:
        raise ConfigError(f"-n {args.n}: must be at least 1")
    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows}: must be at least 1")
    if args.compare and weights is None:
        raise ConfigError(
            "--compare measures --weights beside the run without it; add --weights, such as --weights int8"
        )
    if args.compare and (other := "draft" if args.draft else "stream-layers" if args.stream_layers else None):
        raise ConfigError(f"--compare measures one model on its devices; leave out --{other}")
    if args.logprobs and not args.json:
        raise ConfigError("--logprobs is printed with --json only; add --json")
    sampling = {name: getattr(args, name) for name in CHOICE if getattr(args, name) is not None}
    if sampling.get("top_k") == 0:
        sampling["top_k"] = None
    settings = Sampling(
        max_tokens=_MOST if args.tokens is None else args.tokens,
        stop=tuple(_unescaped(s) for s in args.stop),
        seed=args.seed,
        ignore_end=args.ignore_end,
        logprobs=args.logprobs,
        **sampling,
    )
    trained = load(args.run)
    say_bytes(trained, weights, args.weights)
    settings = dataclasses.replace(settings, **_sampling(trained, sampling))
    each = [dataclasses.replace(settings, seed=(args.seed + i) % 2**32) for i in range(args.n)]
    prompts = [args.prompt or ""] if args.prompts is None else _read(args.prompts)
    template = ChatTemplate.read(trained.path / "hf") if args.chat else None
    tokenizer: Any = trained.tokenizer if args.chat else None
    longest = trained_length(trained)

    def ids_of(prompt: str) -> Any:
        if template is None:
            return trained.prompt_ids(prompt)
        return template.ids([{"role": "user", "content": prompt}], tokenizer)

    def with_length(prompt: str, sampling: Sampling) -> Sampling:
        if args.tokens is not None:
            return sampling
        return dataclasses.replace(sampling, max_tokens=max(1, min(_MOST, longest - len(ids_of(prompt)))))

    requests = [(p, with_length(p, s)) for p in prompts for s in each]
    inputs = [p if template is None else ids_of(p).tolist() for p, _ in requests]
    layout = layout_of(args)
    options: dict[str, Any] = dict(layout=layout, step=args.step, rows=args.rows, draft_tokens=args.draft_tokens)
    options |= dict(stream_layers=args.stream_layers, weights=weights)
    if cache := cache_of(args):
        options["cache"] = Paged(**cache)
    draft = draft_of(args)
    printer = _Printer([p if template is None or args.json else "" for p, _ in requests], args.json)
    speed = _Speed()
    for piece in pieces(trained, inputs, [s for _, s in requests], draft=draft, **options):
        printer.take(piece.prompt, piece.text, piece.completion)
        speed.take(piece.completion)
    if not args.json and (line := speed.line()):
        print(f"jaxscale: {line}", file=sys.stderr)
    if draft is not None and not args.json:
        share = printer.last.acceptance or 0.0
        print(f"jaxscale: {share:.0%} of the drafted tokens were accepted", file=sys.stderr)
    if args.compare:
        _compare(trained, inputs, [s for _, s in requests], weights, args.weights, layout=layout, step=args.step,
                 rows=args.rows, cache=options.get("cache"))  # fmt: skip
    return 0


def _compare(trained: Any, inputs: Any, settings: Any, weights: Any, name: str, **options: Any) -> None:
    """Print tokens per second and bytes with a weight format and without."""
    from jaxscale.infer.rates import rates
    from jaxscale.units import human_bytes

    few, plain = rates(trained, inputs, settings, [weights, None], **options)
    for what, rate in ((f"with --weights {name}", few), ("without", plain)):
        peak = "" if rate.peak is None else f", at most {human_bytes(rate.peak)} of memory on a device so far"
        print(
            f"jaxscale: {what}: {rate.tokens_per_second:.4g} tokens/s ({rate.tokens} tokens), "
            f"{human_bytes(rate.parameters)} of parameters{peak}",
            file=sys.stderr,
        )
    speed, size = few.tokens_per_second / plain.tokens_per_second, few.parameters / plain.parameters
    print(f"jaxscale: {name} has {speed:.2f} times the speed and {size:.2f} times the bytes", file=sys.stderr)


def _sampling(trained: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Sampling settings: the options, else those of generation_config.json, which are printed."""
    own = trained.choice(but=options)
    if options.get("temperature", own.get("temperature")) == 0:  # greedy: top-k, top-p and min-p have no effect
        own = {name: value for name, value in own.items() if name in ("temperature", "repetition_penalty")}
    if own:
        listed = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in own.items())
        print(f"jaxscale: using {listed} from generation_config.json", file=sys.stderr)
    return {"temperature": 0.8, **own, **options}


class _Speed:
    """Counts tokens, and the time since the first one."""

    def __init__(self) -> None:
        self._first = self._last = 0.0
        self._tokens = 0

    def take(self, completion: Completion | None) -> None:
        """Take a piece: a token of a sequence, and the completion if that is complete."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        if completion is not None:
            self._tokens += len(completion.ids)

    def line(self) -> str:
        """Tokens per second after the first token, and the most memory of a device where it is reported."""
        if self._tokens < 2 or self._last <= self._first:
            return ""
        import jax

        from jaxscale.units import human_bytes

        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        memory = "" if peak is None else f", at most {human_bytes(peak)} of memory on a device"
        rate = (self._tokens - 1) / (self._last - self._first)
        return f"{self._tokens} tokens, {rate:.3g} tokens/s after the first{memory}"


class _Printer:
    """Prints completions in order: the first incomplete one token by token, later ones once it is complete."""

    def __init__(self, prompts: list[str], as_json: bool):
        self._prompts, self._json = prompts, as_json
        self._waiting = [""] * len(prompts)
        self._done: list[Completion | None] = [None] * len(prompts)
        self._at = -1
        self.last: Any = None

    def take(self, i: int, text: str, completion: Completion | None) -> None:
        """Take new text of prompt `i`, and its completion if that is complete."""
        if self._at < 0:  # print no prompt before the first token
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


def _as_json(prompt: str, completion: Completion) -> str:
    row = {
        "prompt": prompt,
        "text": completion.text,
        "finished": completion.finished,
        "tokens": len(completion.ids),
        "ids": completion.ids,
        "logprobs": completion.logprobs,
        "seconds": round(completion.seconds, 4),
        "first_token": round(completion.first_token, 4),
    }
    if any(completion.top):
        row["top"] = completion.top
    if completion.acceptance is not None:
        row["acceptance"] = completion.acceptance
    return json.dumps(row, ensure_ascii=False)


def _unescaped(text: str) -> str:
    r"""Replace `\n` and `\t` in an option by the characters, which are hard to type in a shell."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _read(file: str) -> list[str]:
    """Read the prompts of a file.

    Raises:
      DataError: it cannot be read, or has no prompt.
    """
    from jaxscale.errors import DataError

    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read the prompts {file} ({e}); give a UTF-8 file with one prompt per line") from None
    # split("\n"): splitlines also splits at other Unicode line separators
    lines = [(n, line.removesuffix("\r")) for n, line in enumerate(content.split("\n"), 1) if line.strip("\r")]
    prompts = [_field(line, f"{file}, line {n}") if file.endswith(".jsonl") else line for n, line in lines]
    if not prompts:
        raise DataError(f"{file} has no prompt; write one per line")
    return prompts


def _field(line: str, place: str) -> str:
    from jaxscale.errors import DataError

    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise DataError(f'{place} is not a JSON object with a string in its field "prompt"')

    return row["prompt"]
