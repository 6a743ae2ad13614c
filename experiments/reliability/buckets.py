"""Attack a run in a bucket: kill it, damage its objects, let the server fail; test that nothing is silent or lost.

    python -m experiments.reliability.buckets --kills 100 --staged 100 --damages 200 --failures 40

The bucket is on a server of S3's protocol on loopback (moto). Parts are chosen with --kills 0 and the like.

Kills: a run that saves every 20 steps is killed (SIGKILL) at random moments and started again, every second time
without its working copy, as on another machine. Its losses are compared with those of a run on a disk that was never
killed. Staged kills: the same with checkpoints that are written to a disk first and uploaded behind the run. Damages:
an object is damaged; `checkpoint verify` has to fail, and reading has to give another whole checkpoint or an error.
Failures: a proxy answers a share of the requests with errors or never, refuses them for some seconds, or lets the
credentials expire; the run has to end with the same parameters, if need be after another start.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxscale as js
from experiments.reliability import lives
from jaxscale import buckets, working_copy
from jaxscale.buckets import Bucket
from jaxscale.cli import main as command
from jaxscale.errors import JaxscaleError
from tests.truth.runs import bigram
from tests.truth.servers import SILENT, at_random, failing, object_stores

RESULTS = Path(__file__).parent / "results" / "buckets.json"
EVERY, REFERENCE = 20, 4000
SEEN = ("damaged", "not what was written", "not sealed", "not finished")
"""What `checkpoint verify` says of an object that is not what was written, or is missing."""
_MANIFEST = re.compile(r"checkpoints/(\d+)/manifest\.json")


def main() -> None:
    """Run the parts and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="number of kills (default %(default)s)")
    parser.add_argument("--staged", type=int, default=100, help="number of kills with train.staging (default 100)")
    parser.add_argument("--damages", type=int, default=200, help="number of damaged objects (default %(default)s)")
    parser.add_argument("--failures", type=int, default=30, help="number of runs with a failing server (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="jaxscale-buckets-"))
    lives.configure(folder / "compiled")
    os.environ["JAXSCALE_CACHE"] = str(folder / "cache")
    os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "2"  # of a silent server; 60 s in use
    working_copy.PERIOD = 0.3
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with object_stores() as variables:
        os.environ.update(variables)
        if args.kills:
            results["kills"] = kills(folder, "s3://runs/killed", args.kills, random.Random(args.seed))
        if args.staged:
            disk = folder / "staging"
            results["staged"] = kills(folder, "s3://runs/staged", args.staged, random.Random(args.seed), disk)
        if args.damages:
            results["damages"] = damages(folder, args.damages, random.Random(args.seed))
        if args.failures:
            results["failures"] = failures(folder, args.failures, random.Random(args.seed), variables)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    shutil.rmtree(folder)
    print(table(results))
    if any(row["faults"] for rows in results.values() for row in rows):
        raise SystemExit(1)


# --- kills ------------------------------------------------------------------------------------------------------------


def kills(folder: Path, url: str, count: int, dice: random.Random, staging: Path | None = None) -> list[dict[str, Any]]:
    """Kill a run and start it again, `count` times; return a row for each."""
    log, rows = folder / "log", []
    if not (folder / "whole").exists():
        lives.wait(lives.start(functools.partial(_fit, folder / "whole", REFERENCE), 1, 1, log))
    want = {row["step"]: row["loss"] for row in _rows((folder / "whole" / "metrics.jsonl").read_bytes())}
    for number in range(count):
        faults: list[str] = []
        moved = dice.random() < 0.5
        if moved:
            shutil.rmtree(folder / "cache" / "buckets", ignore_errors=True)
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)
        before = max(_finished(url), default=0)
        child = lives.start(functools.partial(_fit, url, 10**6, staging), 1, 1, log)
        ahead = dice.randint(1, 3)
        if not lives.until(lambda: max(_finished(url), default=0) >= before + ahead * EVERY, child):  # noqa: B023
            faults.append("did not get that far: " + " ".join(log.read_text().splitlines()[-3:]))
        time.sleep(dice.random() * 0.4)
        lives.kill(child)
        lives.wait(child)
        finished, keys = _finished(url), _keys(url)
        unfinished = {k.split("/")[1] for k in keys if re.match(r"checkpoints/\d+/", k)} - {str(s) for s in finished}
        metrics = _rows(_get(url, "metrics.jsonl"))
        steps = [row["step"] for row in metrics]
        last = {row["step"]: row["loss"] for row in metrics}
        if missing := [s for s in range(1, max(finished, default=0) + 1) if s not in last]:
            faults.append(f"metrics lack steps {missing[:5]} before checkpoint {max(finished)}")
        if wrong := [s for s, loss in last.items() if want.get(s, loss) != loss]:
            faults.append(f"steps {wrong[:5]} have other losses than an uninterrupted run")
        checked = folder / "checked"
        checked.unlink(missing_ok=True)
        lives.wait(lives.start(functools.partial(_verify, url, checked), 1, 1, log))
        faults += checked.read_text().splitlines() if checked.exists() else ["verification ended"]
        rows.append({"kill": number, "moved": moved, "hit": "a save" if unfinished else "a step", "faults": faults,
                     "at": steps[-1] if steps else 0, "newest": max(finished, default=0)})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _fit(run: str | Path, steps: int, staging: Path | None = None) -> None:
    settings = bigram(steps=steps, checkpoint_every=EVERY, keep=2, staging=None if staging is None else str(staging))
    js.fit(js.TrainConfig(**settings), run=run, resume="newest", quiet=True)


def _verify(run: str, out: Path) -> None:
    os.environ["JAXSCALE_CACHE"] = str(out.parent / "cache of the check")  # the run's working copy stays
    checkpoints = js.train.checkpoints_in(run)
    faults = [fault for step in checkpoints.steps() for fault in checkpoints.arrays(step).faults()]
    out.write_text("".join(f"{fault}\n" for fault in faults))


def _get(run: str, key: str) -> bytes:
    """Read an object by plain HTTP: the parent uses no TensorStore, since it forks."""
    url = f"{os.environ['AWS_ENDPOINT_URL']}/{run.removeprefix('s3://')}/{urllib.parse.quote(key)}"
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request"}
    with contextlib.suppress(urllib.error.HTTPError):
        with urllib.request.urlopen(urllib.request.Request(url, headers=signed)) as answer:
            return answer.read()
    return b""


def _keys(run: str) -> list[str]:
    bucket, _, name = run.removeprefix("s3://").partition("/")
    keys, token = [], ""
    while True:
        query = f"list-type=2&prefix={name}/{token}"
        with urllib.request.urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/{bucket}?{query}") as answer:
            text = answer.read().decode()
        keys += [key.removeprefix(f"{name}/") for key in re.findall("<Key>(.*?)</Key>", text)]
        more = re.search("<NextContinuationToken>(.*?)</NextContinuationToken>", text)
        if more is None:
            return keys
        token = f"&continuation-token={urllib.parse.quote(more[1])}"


def _finished(run: str) -> list[int]:
    return sorted(int(match[1]) for key in _keys(run) if (match := _MANIFEST.fullmatch(key)))


def _rows(data: bytes) -> list[dict[str, Any]]:
    lines = data.decode().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


# --- damages ----------------------------------------------------------------------------------------------------------


def damages(folder: Path, count: int, dice: random.Random) -> list[dict[str, Any]]:
    """Damage one object of a run at a time; return a row for each."""
    url = "s3://runs/damaged"
    config = js.TrainConfig(**bigram(steps=6, checkpoint_every=2, keep=2))
    whole = js.fit(config, run=url, quiet=True)
    want = {step: _bytes(whole, step) for step in (4, 6)}
    bucket, rows = Bucket(url), []
    small = ["run.json", "config.gin", "metrics.jsonl"]
    keys = [key for key in bucket.list() if "/tensors/" in key or key.endswith("manifest.json")] + 6 * small
    while len(rows) < count:
        key, kind = dice.choice(keys), dice.choice(list(KINDS))
        good = bucket.read(key)
        bad = KINDS[kind](good, dice, bucket.read(dice.choice(keys)))
        if bad == good:
            continue
        bucket.delete(key) if bad is None else bucket.write(key, bad or b"\0")
        faults, code, text = [], *_command("checkpoint", "verify", url)
        seen = code != 0 or any(words in text for words in SEEN)
        try:
            _forget()
            step = 6
            run = js.load(url)
            got = _bytes(run, None)
            step = 6 if got == want[6] else 4
            silent = got not in (want[6], want[4])
            answer = f"checkpoint {step}"
        except JaxscaleError as e:
            silent, answer = False, f"error: {str(e)[:80]}"
        if silent:
            faults.append("other parameters were loaded without an error")
        cut = key == "metrics.jsonl" and kind in ("truncate", "delete")  # a shorter file of lines is valid
        if not seen and not cut and not answer.startswith("error"):
            faults.append(f"checkpoint verify saw nothing: {text[-200:]}")
        bucket.write(key, good)
        rows.append({"object": key.rsplit("/", 1)[-1], "kind": kind, "verify": code, "read": answer, "faults": faults})
        if faults:
            print(len(rows), key, rows[-1], flush=True)
    return rows


def _flip(data: bytes, dice: random.Random, other: bytes) -> bytes:
    out = bytearray(data)
    out[dice.randrange(len(out))] ^= 1 << dice.randrange(8)
    return bytes(out)


KINDS: dict[str, Callable[[bytes, random.Random, bytes], bytes | None]] = {
    "flip": _flip,
    "truncate": lambda data, dice, other: data[: dice.randrange(len(data))],
    "zeros": lambda data, dice, other: bytes(len(data)),
    "another object": lambda data, dice, other: other,
    "delete": lambda data, dice, other: None,
}


def _command(*words: str) -> tuple[int, str]:
    _forget()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = command(list(words))
    return code, out.getvalue()


def _forget() -> None:
    working_copy._fetched.clear()
    shutil.rmtree(working_copy.cache_root(), ignore_errors=True)


def _bytes(run: js.Run, step: int | None) -> bytes:
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(run.trained(step, None)))


# --- failing servers --------------------------------------------------------------------------------------------------


def failures(folder: Path, count: int, dice: random.Random, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Train while the server fails; return a row for each run."""
    buckets.RETRIES = {"max_retries": 6, "initial_delay": "5ms", "max_delay": "80ms"}
    config = js.TrainConfig(**bigram(steps=12, checkpoint_every=2, keep=2))
    want = _bytes(js.fit(config, run=folder / "unharmed", quiet=True), None)
    rows = []
    for number in range(count):
        kind = ("errors", "outage", "expired credentials", "silence")[number % 4]
        url, starts, messages, faults = f"s3://runs/failing-{number}", 0, [], []
        share, calls, first = dice.choice((0.1, 0.3, 0.5)), iter(range(10**9)), dice.randrange(20, 600)
        odd = at_random(share, (500, 503, 0), number)
        faulty = {
            "errors": odd,
            "silence": at_random(0.02, (SILENT,), number),
            "outage": lambda method, path: 503 if first < next(calls) < first + 60 else None,  # noqa: B023
            "expired credentials": lambda method, path: 403 if first < next(calls) < first + 30 else None,  # noqa: B023
        }[kind]
        with failing(variables["AWS_ENDPOINT_URL"], faulty) as proxy:
            os.environ["AWS_ENDPOINT_URL"] = proxy
            while starts < 40:
                starts += 1
                working_copy._fetched.clear()
                try:
                    js.fit(config, run=url, resume="newest", quiet=True)
                    break
                except JaxscaleError as e:
                    messages.append(str(e)[:160])
                except Exception as e:  # a fault: users get one sentence
                    faults.append(f"{type(e).__name__}: {e}"[:300])
        os.environ["AWS_ENDPOINT_URL"] = variables["AWS_ENDPOINT_URL"]
        _forget()
        if _bytes(js.load(url), None) != want:
            faults.append("other parameters than an unharmed run")
        if [row["step"] for row in js.load(url).metrics()] != list(range(1, 13)):
            faults.append("metrics lack steps")
        rows.append({"kind": kind, "share": share if kind == "errors" else None, "starts": starts, "faults": faults,
                     "messages": sorted(set(messages))})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results as Markdown."""
    lines = ["| attack | count | without a fault |", "|---|---|---|"]
    groups: dict[str, list[bool]] = {}
    for row in results.get("kills", []):
        groups.setdefault(f"kill during {row['hit']}{', then another machine' if row['moved'] else ''}", []).append(
            not row["faults"]
        )
    for row in results.get("staged", []):
        name = f"staged: kill during {'an upload' if row['hit'] == 'a save' else 'a step'}"
        groups.setdefault(f"{name}{', then another machine' if row['moved'] else ''}", []).append(not row["faults"])
    for row in results.get("damages", []):
        groups.setdefault(f"damage: {row['kind']}", []).append(not row["faults"])
    for row in results.get("failures", []):
        name = f"{row['share']:.0%} of requests fail" if row["share"] else row["kind"]
        groups.setdefault(f"server: {name}", []).append(not row["faults"])
    lines += [f"| {name} | {len(good)} | {sum(good)} |" for name, good in sorted(groups.items())]
    starts = Counter(row["starts"] for row in results.get("failures", []))
    return "\n".join([*lines, "", f"starts that a run with a failing server needed: {dict(sorted(starts.items()))}"])


if __name__ == "__main__":
    main()
