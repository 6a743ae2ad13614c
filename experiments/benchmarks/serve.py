"""`jaxscale serve` with 1, 8 and 64 clients: tokens a second and time to first token, with and without HTTP.

    python experiments/benchmarks/serve.py             a few minutes on two cores
    python experiments/benchmarks/serve.py --quick     a smaller model, fewer tokens

Each client streams one request after the other; clients are threads of another process. "Engine alone" gets the same
prompts from a list, as many at a time, in this process, with an engine of its own. Both are measured in turns, so that
other load slows both; a ratio is the median over rounds. Weights are random, which does not change the work.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import measure

CLIENTS = (1, 8, 64)


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and of the requests.

    Args:
      depth, width: sizes of the model, whose vocabulary is 256.
      prompt, tokens: prompt tokens and generated tokens of each request.
      rows: slots of the engine.
      texts: requests of each client in a round.
      rounds: timed rounds.
    """

    depth: int = 4
    width: int = 256
    prompt: int = 64
    tokens: int = 32
    rows: int = 16
    texts: int = 2
    rounds: int = 3


QUICK = Size(depth=2, width=64, tokens=16, rounds=3)


@dataclasses.dataclass(frozen=True)
class Letters:
    """A tokenizer with one letter for every id, so that every token is streamed at once."""

    name = "letters"
    fingerprint = "letters"
    vocab_size = 256
    eos_id = 0

    def encode(self, text: str) -> Any:
        """Not used: prompts are ids."""
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        """Return one letter for each id."""
        return "".join(chr(97 + int(i) % 26) for i in ids)


def prompts(size: Size, count: int, seed: int) -> list[list[int]]:
    """Return `count` random prompts."""
    import random

    draw = random.Random(seed)
    return [[draw.randrange(1, 256) for _ in range(size.prompt)] for _ in range(count)]


def clients(url: str, number: int, size: Size, seed: int) -> dict[str, Any]:
    """Send requests from `number` clients at the same time; runs in a process of its own.

    Returns:
      "seconds" and "tokens" of all requests, and for each request "first" (seconds to its first token) and "each"
      (seconds between its tokens).
    """
    address = urlsplit(url)
    count = number * size.texts
    requests = prompts(size, count, seed)
    first: list[float] = []
    each: list[float] = []
    places = iter(range(count))
    lock = threading.Lock()
    got = [0]

    def client() -> None:
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            body = {
                "prompt": requests[place],
                "max_tokens": size.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            start = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"{response.status}: {response.read()!r}")
            times, letters = [], 0
            while line := response.readline():
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
                    letters += len(json.loads(line[6:])["choices"][0]["text"])
            with lock:
                got[0] += letters
                first.append(times[0] - start)
                each.append((times[-1] - times[0]) / (letters - 1))

    threads = [threading.Thread(target=client) for _ in range(number)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - start, "tokens": got[0], "first": first, "each": each}


def alone(engine: Any, number: int, size: Size, seed: int) -> dict[str, Any]:
    """The same texts, as many at once, given to an engine by hand."""
    from jaxscale.infer.engine import Request
    from jaxscale.infer.sampling import Sampling

    count = number * size.texts
    waiting = list(enumerate(prompts(size, count, seed)))
    began: dict[int, float] = {}
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    tokens = 0
    start = time.perf_counter()
    while waiting or engine.busy:
        while waiting and len(began) - len(last) < number:
            place, ids = waiting.pop(0)
            began[place] = time.perf_counter()
            sampling = Sampling(max_tokens=size.tokens, temperature=0.0, ignore_end=True)
            engine.submit(Request(tuple(ids), sampling, place))
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            tokens += 1
            first.setdefault(event.id, now - began[event.id])
            if event.finished:
                last[event.id] = now
    each = [(last[i] - began[i] - first[i]) / (size.tokens - 1) for i in first]
    return {"seconds": time.perf_counter() - start, "tokens": tokens, "first": list(first.values()), "each": each}


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer tokens")
    parser.add_argument("--asking", nargs=3, metavar=("URL", "CLIENTS", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = QUICK if args.quick else Size()
    if args.asking is not None:
        print(json.dumps(clients(args.asking[0], int(args.asking[1]), size, int(args.asking[2]))))
        return
    result = serve_and_ask(size, args.quick)
    measure.write("serve_quick" if args.quick else "serve", result)
    header = ("clients", "tokens/s", "engine alone", "ratio", "quartiles", "first token, ms", "p95", "a token, ms")
    rows = [_row(number, row) for number, row in result["clients"].items()]
    for cells in (header, *rows):
        print(" | ".join(f"{c:>16}" for c in cells))
    if not args.quick:
        measure.fill("serve", header, rows)


def serve_and_ask(size: Size, quick: bool) -> dict[str, Any]:
    """Measure every number of clients, in turns with the engine alone."""
    import jax

    import jaxscale as js
    from jaxscale.infer.cache import Paged
    from jaxscale.infer.engine import Cached, Engine
    from jaxscale.infer.serve import Served, Server
    from jaxscale.step import describe_model, make_params

    config = js.models.Transformer.Config(
        depth=size.depth, vocab=256, width=size.width, heads=max(2, size.width // 64), hidden=4 * size.width
    )
    graphdef, _ = describe_model(config)
    params = jax.jit(make_params, static_argnums=(0, 1))(config, 0)
    length = size.prompt + size.tokens

    def engine() -> Engine:
        made = Engine(Cached(graphdef, params, cache=Paged(16), rows=size.rows, length=length, end_ids=(0,)))
        made.compile()
        return made

    served = Served("letters", Letters(), length, 256, lambda text: [], end_ids=frozenset({0}))
    measured: dict[int, dict[str, list[Any]]] = {n: {"served": [], "alone": []} for n in CLIENTS}
    by_hand = engine()
    with Server(port=0) as server:
        server.open(served, engine())
        for turn in range(size.rounds + 1):
            for number in CLIENTS:
                ways = {
                    "served": lambda n=number, t=turn: _process(server.url, n, t, quick),
                    "alone": lambda n=number, t=turn: alone(by_hand, n, size, t),
                }
                for name in list(ways) if turn % 2 else reversed(list(ways)):
                    one = ways[name]()
                    assert one["tokens"] == number * size.texts * size.tokens, one["tokens"]
                    if turn:  # the first turn is a warm-up
                        measured[number][name].append(one)
        preemptions = server.api().worker.stats.preemptions
    device = f"{jax.devices()[0].device_kind}"
    about = {**measure.facts(device), "size": dataclasses.asdict(size), "preemptions": preemptions}
    return about | {"clients": {str(n): _summary(rounds) for n, rounds in measured.items()}}


def _process(url: str, number: int, seed: int, quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--asking", url, str(number), str(seed), *(["--quick"] if quick else [])]
    done = subprocess.run(command, env=measure.environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the clients failed: {done.stderr}")
    return json.loads(done.stdout)


def _summary(rounds: dict[str, list[Any]]) -> dict[str, Any]:
    speed = {name: [r["tokens"] / r["seconds"] for r in own] for name, own in rounds.items()}
    out: dict[str, Any] = {"ratio": dataclasses.asdict(measure.ratio(speed["served"], speed["alone"]))}
    for name, own in rounds.items():
        first = sorted(x for r in own for x in r["first"])
        out[name] = {
            "tokens_per_second": statistics.median(speed[name]),
            "first_token_seconds": statistics.median(first),
            "first_token_p95_seconds": first[int(0.95 * (len(first) - 1))],
            "token_seconds": statistics.median(x for r in own for x in r["each"]),
            "rounds": speed[name],
        }
    return out


def _row(number: str, row: dict[str, Any]) -> tuple[str, ...]:
    served, ratio = row["served"], row["ratio"]
    return (
        number,
        f"{served['tokens_per_second']:,.0f}",
        f"{row['alone']['tokens_per_second']:,.0f}",
        f"{ratio['median']:.2f}",
        f"{ratio['low']:.2f}–{ratio['high']:.2f}",
        f"{1e3 * served['first_token_seconds']:.0f}",
        f"{1e3 * served['first_token_p95_seconds']:.0f}",
        f"{1e3 * served['token_seconds']:.1f}",
    )


if __name__ == "__main__":
    main()
