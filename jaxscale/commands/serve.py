"""`jaxscale serve`: serves a run's model over OpenAI's HTTP API."""

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

from jaxscale.commands.shared import (
    TEXT,
    accept_argument,
    cache_argument,
    draft_arguments,
    draft_of,
    import_argument,
    say_bytes,
    weights_argument,
    weights_of,
)
from jaxscale.errors import ConfigError, RunError
from jaxscale.interrupts import handled_signals

_DESCRIPTION = """\
Serves a run's model over HTTP: /v1/completions, /v1/chat/completions (both streaming), /v1/models, /health, /metrics.

  jaxscale serve runs/demo-1
  curl --json '{"prompt": "def ", "max_tokens": 32}' http://127.0.0.1:8000/v1/completions

Addresses other than 127.0.0.1 need an API key, from --api-key-file or the environment variable JAXSCALE_API_KEY. There
is no TLS: use a proxy in front if the network is not trusted. On SIGTERM and Ctrl-C running requests have --drain
seconds to complete. All programs are compiled before the first answer, and cached for the next start in
~/.cache/jaxscale (JAXSCALE_CACHE), or in the folder of JAX_COMPILATION_CACHE_DIR.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve", help="serve a run's model over OpenAI's HTTP API", description=_DESCRIPTION, formatter_class=TEXT
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, such as runs/demo-1")
    import_argument(parser)
    accept_argument(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 chooses a free port (default 8000)")
    key = parser.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key", metavar="KEY", help="key that clients must send; visible to other users of this machine"
    )
    key.add_argument("--api-key-file", metavar="FILE", help="a file with that key")
    parser.add_argument("--name", help="name of the model for clients (default: the folder's name)")
    parser.add_argument("--mesh", metavar="SIZES", help='mesh of the model, such as "tensor=4" (default: one device)')
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N devices on this machine's CPU")
    parser.add_argument(
        "--rows", type=int, default=8, help="sequences decoded at once, for each data-parallel shard (default 8)"
    )
    parser.add_argument(
        "--length", type=int, metavar="TOKENS", help="longest sequence, prompt included (default: as in training)"
    )
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="tokens per step (default 256, or twice --rows)")
    parser.add_argument("--pages", type=int, help="pages of the KV cache (default: enough for --rows full sequences)")
    parser.add_argument("--page", type=int, default=16, metavar="TOKENS", help="tokens per page (default 16)")
    cache_argument(parser)
    draft_arguments(parser)
    parser.add_argument(
        "--stream-layers",
        metavar="FROM",
        help="for models larger than device memory: load layers one at a time from host memory or from disk; "
        "host:4 has four layers on the device, not two",
    )
    weights_argument(parser)
    parser.add_argument("--max-body", type=int, metavar="BYTES", help="largest HTTP request (default 1 MiB)")
    parser.add_argument("--max-prompt", type=int, metavar="TOKENS", help="longest prompt (default: up to --length)")
    parser.add_argument("--max-requests", type=int, metavar="N", help="sequences that wait or run (default 512)")
    parser.add_argument("--max-share", type=int, metavar="N", help="of these, sequences of one client (default: half)")
    parser.add_argument("--max-time", type=float, metavar="SECONDS", help="longest time of an answer (default 600)")
    parser.add_argument("--drain", type=float, metavar="SECONDS", help="time to complete requests at exit (default 30)")
    parser.add_argument(
        "--neutral",
        action="store_true",
        help="ignore generation_config.json: requests default to temperature 1, without top-k, top-p and penalty",
    )
    parser.add_argument("--quiet", action="store_true", help="do not log requests")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Serve until a signal; returns the exit code 0."""
    weights = weights_of(args, bindings)
    from jaxscale import Layout, load
    from jaxscale.infer.serve import Limits, Server, engine_of, served_by
    from jaxscale.sweep.programs import keep_programs

    keep_programs()
    logging.getLogger("jaxscale.serve").setLevel(logging.WARNING if args.quiet else logging.INFO)
    options = {
        "body": args.max_body,
        "prompt": args.max_prompt,
        "requests": args.max_requests,
        "share": args.max_share,
        "time": args.max_time,
        "drain": args.drain,
    }
    limits = Limits(**{name: value for name, value in options.items() if value is not None})
    trained = load(args.run)
    say_bytes(trained, weights, args.weights)
    # Before listening, so that errors of the folder come first.
    served = served_by(trained, args.name, args.length, choice=not args.neutral)
    layout = None if args.mesh is None else Layout(args.mesh)
    draft = draft_of(args)
    if served.choice:
        listed = ", ".join(f"{name} {value:g}" for name, value in served.choice.items())
        print(f"jaxscale: request defaults from generation_config.json: {listed} (--neutral: none)", file=sys.stderr)
    with Server(host=args.host, port=args.port, key=_key(args), limits=limits) as server:
        print(f"jaxscale: listening at {server.url}; loading the model", file=sys.stderr, flush=True)
        sizes = {"rows": args.rows, "budget": args.budget, "pages": args.pages, "page": args.page}
        more = {"draft": draft, "draft_tokens": args.draft_tokens, "stream_layers": args.stream_layers}
        more |= {"weights": weights, "kv_cache": args.kv_cache, "ring": args.ring}
        server.open(served, engine_of(trained, served, layout=layout, note=_Progress(), **sizes, **more))
        stop = _Signals()
        print(f"serving '{served.name}' at {server.url}/v1", flush=True)
        while not stop.wait(0.5):
            if server.state == "failed":
                raise RunError("the engine failed; see the log above")
        if not server.drain(look=lambda: stop.times > 1):
            print("jaxscale: some answers were not completed", file=sys.stderr)
        if (line := server.summary()) is not None:
            print(f"jaxscale: {line}", file=sys.stderr)
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
    """Prints a line before each program that is compiled."""

    def __init__(self) -> None:
        self.since = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        seconds = time.monotonic() - self.since
        text = f"jaxscale: compiling program {done + 1} of {of}, after {seconds:.0f} s"
        print(text, file=sys.stderr, flush=True)


class _Signals:
    """Counts SIGTERM and SIGINT: the first starts draining, the second stops at once."""

    def __init__(self) -> None:
        self.times, self._event = 0, threading.Event()
        for number in handled_signals():
            signal.signal(number, self._count)

    def _count(self, *_: Any) -> None:
        self.times += 1
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Wait for a signal; returns whether one was received."""
        return self._event.wait(seconds)
