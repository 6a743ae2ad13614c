"""`jaxscale serve`: answers OpenAI's clients with a run's model."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jaxscale.commands.shared import TEXT, accept_argument, import_argument, weights_argument, weights_of
from jaxscale.errors import ConfigError, RunError
from jaxscale.interrupts import handled_signals

_DESCRIPTION = """\
Serves a run's model over HTTP: /v1/completions, /v1/chat/completions (both streaming), /v1/models, /health, /metrics.

  jaxscale serve runs/demo-1
  curl --json '{"prompt": "def ", "max_tokens": 32}' http://127.0.0.1:8000/v1/completions

On another host than 127.0.0.1 an API key is needed, from --api-key-file or the variable JAXSCALE_API_KEY. There is no
TLS: put a proxy in front where the network is not trusted. SIGTERM and Ctrl-C end what runs, for --drain seconds.
Everything is compiled before the first answer, and kept for the next start in ~/.cache/jaxscale (JAXSCALE_CACHE) or the
folder that JAX_COMPILATION_CACHE_DIR names.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve", help="answer OpenAI's clients with a run's model", description=_DESCRIPTION, formatter_class=TEXT
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, as runs/demo-1")
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    key = parser.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key", metavar="KEY", help="that clients must send; other users of this machine can see it here"
    )
    key.add_argument("--api-key-file", metavar="FILE", help="a file that holds it")
    parser.add_argument("--name", help="what clients call the model (default: the folder's name)")
    parser.add_argument("--mesh", metavar="SIZES", help='where the model lives, as "tensor=4"')
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument(
        "--rows", type=int, default=8, help="texts under way at once, for each part of the batch (default 8)"
    )
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of a text, prompt included (default: as trained)")
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="of a step (default 256, or twice --rows)")
    parser.add_argument("--pages", type=int, help="of the cache (default: enough for rows of full length)")
    parser.add_argument("--page", type=int, default=16, metavar="TOKENS", help="of a page (default 16)")
    parser.add_argument(
        "--draft", metavar="RUN", help="a run whose smaller model proposes tokens (speculative decoding)"
    )
    parser.add_argument("--draft-tokens", type=int, default=4, metavar="N", help="proposals of a round (default 4)")
    parser.add_argument(
        "--stream-layers",
        choices=("host", "disk"),
        help="layers come to the device one by one, for models larger than its memory",
    )
    weights_argument(parser)
    parser.add_argument("--max-body", type=int, metavar="BYTES", help="of a request (default 1 MiB)")
    parser.add_argument("--max-prompt", type=int, metavar="TOKENS", help="(default: what --length leaves)")
    parser.add_argument("--max-requests", type=int, metavar="TEXTS", help="that wait or run at once (default 512)")
    parser.add_argument("--max-share", type=int, metavar="TEXTS", help="of them, of one client (default: half)")
    parser.add_argument("--max-time", type=float, metavar="SECONDS", help="for an answer (default 600)")
    parser.add_argument("--drain", type=float, metavar="SECONDS", help="for what runs, at the end (default 30)")
    parser.add_argument(
        "--neutral",
        action="store_true",
        help="a request that says nothing is sampled at temperature 1, uncut, whatever generation_config.json has",
    )
    parser.add_argument("--quiet", action="store_true", help="no line for each request")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Does it."""
    weights = weights_of(args, bindings)
    from jaxscale import Layout, load
    from jaxscale.infer.serve import Limits, Server, engine_of, served_by
    from jaxscale.sweep.programs import keep_programs

    keep_programs()
    logging.getLogger("jaxscale.serve").setLevel(logging.WARNING if args.quiet else logging.INFO)
    given = {
        "body": args.max_body,
        "prompt": args.max_prompt,
        "requests": args.max_requests,
        "share": args.max_share,
        "time": args.max_time,
        "drain": args.drain,
    }
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    trained = load(args.run)
    # before anybody listens, so that what is wrong with the folder is said first
    served = served_by(trained, args.name, args.length, choice=not args.neutral)
    layout = None if args.mesh is None else Layout(args.mesh)
    draft = None if args.draft is None else load(args.draft)
    if served.choice:
        told = ", ".join(f"{name} {value:g}" for name, value in served.choice.items())
        print(f"jaxscale: a request's defaults, of generation_config.json: {told} (--neutral: none)", file=sys.stderr)
    with Server(host=args.host, port=args.port, key=_key(args), limits=limits) as server:
        print(f"jaxscale: listening at {server.url}; loading the model", file=sys.stderr, flush=True)
        sizes = {"rows": args.rows, "budget": args.budget, "pages": args.pages, "page": args.page}
        ways = {"draft": draft, "draft_tokens": args.draft_tokens, "stream_layers": args.stream_layers}
        ways["weights"] = weights
        server.open(served, engine_of(trained, served, layout=layout, note=_Progress(), **sizes, **ways))
        stop = _Signals()
        print(f"serving '{served.name}' at {server.url}/v1", flush=True)
        while not stop.wait(0.5):
            if server.state == "failed":
                raise RunError("the engine failed; the log above says how")
        if not server.drain(look=lambda: stop.times > 1):
            print("jaxscale: some answers were cut off", file=sys.stderr)
    return 0


def _key(args: argparse.Namespace) -> str | None:
    if args.api_key is not None:
        return args.api_key
    if args.api_key_file is None:
        return os.environ.get("JAXSCALE_API_KEY") or None
    try:
        return Path(args.api_key_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {args.api_key_file} cannot be read: {e}") from None


class _Progress:
    """Tells people of every step that is compiled."""

    def __init__(self) -> None:
        self.since = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        seconds = time.monotonic() - self.since
        text = f"jaxscale: compiling step {done + 1} of {of}, after {seconds:.0f} s"
        print(text, file=sys.stderr, flush=True)


class _Signals:
    """Counts SIGTERM and SIGINT from now on; the first asks for an orderly end, the second for an end."""

    def __init__(self) -> None:
        self.times, self._event = 0, threading.Event()
        for number in handled_signals():
            signal.signal(number, self._came)

    def _came(self, *_: Any) -> None:
        self.times += 1
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Whether one has come."""
        return self._event.wait(seconds)
