"""Which committed results are older than the sources that they depend on.

    make stale                                          # a table: each result, its commit, the sources changed since
    python experiments/stale.py --record scaling_law    # after measuring again: the current commit and digest
    python experiments/stale.py --markdown              # the same table, for the documentation

`results.toml` beside this file has an entry for each result: the page that shows it, its data file, the commit, the
sources it depends on (glob patterns) and a digest of those sources at that commit. Docstrings, comments and blank lines
are not part of a digest: rewording an explanation does not make a measurement old.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import hashlib
import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results.toml"


@dataclasses.dataclass(frozen=True)
class Result:
    """An entry of `results.toml`.

    Args:
        name: what `--record` calls it.
        page: the Markdown file that shows it, from the repository's root.
        data: the file or folder with its numbers, or "" where the page has them all.
        commit: abbreviated commit whose sources were measured; where that commit was rebased away, the one that added
            the result.
        sources: glob patterns of the files it depends on; `**` stands for any folders.
        digest: of those files at that commit, 16 hexadecimal digits.
    """

    name: str
    page: str
    data: str
    commit: str
    sources: tuple[str, ...]
    digest: str


def results() -> list[Result]:
    """Return every entry of `results.toml`."""
    entries = tomllib.loads(RESULTS.read_text())["result"]
    return [Result(**{**entry, "sources": tuple(entry["sources"])}) for entry in entries]


def code_only(source: str) -> str:
    """Return Python source without docstrings, comments, blank lines and trailing spaces, on any Python version."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1]:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def _content(name: str, raw: bytes) -> bytes:
    return code_only(raw.decode()).encode() if name.endswith(".py") else raw


def digest(files: Mapping[str, bytes]) -> str:
    """Return 16 hexadecimal digits that depend on the names and the code of files, and on nothing else."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{hashlib.sha256(_content(name, files[name])).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the names that a pattern matches; `*` does not cross folders, `**/` stands for any number of them."""
    regular = [re.compile(re.escape(p).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")) for p in patterns]
    return sorted(name for name in names if any(r.fullmatch(name) for r in regular))


def _git(*arguments: str) -> str:
    try:
        ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:  # git is not installed
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def working_files(result: Result) -> dict[str, bytes]:
    """Return the sources of a result as they are now: path from the repository's root to content."""
    folders = {pattern.split("*")[0].rsplit("/", 1)[0] for pattern in result.sources}
    names = [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return {name: (ROOT / name).read_bytes() for name in matching(names, result.sources)}


def committed_files(result: Result, commit: str) -> dict[str, bytes]:
    """Return the sources of a result at a commit; empty where this copy of the repository lacks that commit."""
    names = matching(_git("ls-tree", "-r", "--name-only", commit).splitlines(), result.sources)
    if not names:  # no git, no repository, or a commit that this copy lacks
        return {}
    objects = "".join(f"{commit}:{name}\n" for name in names).encode()
    command = ["git", "-C", str(ROOT), "cat-file", "--batch"]
    stream = io.BytesIO(subprocess.run(command, input=objects, capture_output=True, check=True).stdout)
    files = {}
    for name in names:
        size = int(stream.readline().split()[-1])  # "<object> blob <size>", then the bytes and a newline
        files[name] = stream.read(size)
        stream.read(1)
    return files


def changed(result: Result) -> list[str]:
    """Return the sources that changed since a result, or its patterns where history is missing."""
    now = working_files(result)
    if digest(now) == result.digest:
        return []
    then = committed_files(result, result.commit)
    if not then:
        return list(result.sources)
    return sorted(
        name
        for name in now.keys() | then.keys()
        if name not in now or name not in then or _content(name, now[name]) != _content(name, then[name])
    )


def record(name: str) -> Result:
    """Write the current commit and digest into the entry of a result that was measured again, and return it.

    Raises:
        SystemExit: the name does not exist, or its sources have changes that are not committed.
    """
    entries = {result.name: result for result in results()}
    if name not in entries:
        near = difflib.get_close_matches(name, entries, 3) or sorted(entries)
        sys.exit(f"results.toml has no result '{name}'; did you mean {' or '.join(near)}?")
    old = entries[name]
    now = working_files(old)
    if digest(now) != digest(committed_files(old, "HEAD")):
        sys.exit(f"the sources of '{name}' have changes that are not committed; commit them, measure, then record")
    new = dataclasses.replace(old, commit=_git("rev-parse", "--short=7", "HEAD").strip(), digest=digest(now))
    text = RESULTS.read_text()
    start = text.index(f'name = "{name}"\n')
    end = text.find("[[result]]", start) if "[[result]]" in text[start:] else len(text)
    entry = text[start:end].replace(f'commit = "{old.commit}"', f'commit = "{new.commit}"')
    RESULTS.write_text(text[:start] + entry.replace(f'"{old.digest}"', f'"{new.digest}"') + text[end:])
    return new


@functools.cache
def table() -> list[tuple[Result, list[str]]]:
    """Return each result with its changed sources, the unchanged results last."""
    rows = [(result, changed(result)) for result in results()]
    return sorted(rows, key=lambda row: (not row[1], row[0].name))


def _summary(sources: list[str]) -> str:
    if not sources:
        return "none"
    more = f" and {len(sources) - 2} more" if len(sources) > 2 else ""
    return ", ".join(sources[:2]) + more


def markdown() -> str:
    """Return how many results are older than their sources, and the table of all, for the documentation."""
    old = sum(bool(sources) for _, sources in table())
    lines = [
        f"{old} of {len(table())} results were measured on older sources (renaming a variable counts; comments and "
        "docstrings do not).",
        "",
    ]
    lines += ["| result | page | commit | sources changed since |", "|---|---|---|---|"]
    for result, sources in table():
        lines.append(f"| {result.name} | `{result.page}` | `{result.commit}` | {_summary(sources)} |")
    return "\n".join(lines) + "\n"


def notes() -> dict[str, str]:
    """Return, for each page that shows results, a paragraph that names their commits and what changed since."""
    lines: dict[str, list[str]] = {}
    for result, sources in table():
        state = f"sources changed since: {_summary(sources)}" if sources else "its sources have not changed since"
        lines.setdefault(result.page, []).append(f"- {result.name}: measured at commit `{result.commit}`; {state}")
    return {page: "\n\n## Are these results current?\n\n" + "\n".join(own) + "\n" for page, own in lines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", metavar="NAME", help="a result was measured again: write commit and digest")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    options = parser.parse_args()
    if options.record:
        result = record(options.record)
        print(f"{result.name}: commit {result.commit}, digest {result.digest}")
    elif options.markdown:
        print(markdown(), end="")
    elif options.json:
        print(json.dumps([{"name": r.name, "page": r.page, "commit": r.commit, "changed": c} for r, c in table()]))
    else:
        rows = table()
        width = max(len(result.name) for result, _ in rows)
        for result, sources in rows:
            print(f"{result.name:{width}}  {result.commit}  {_summary(sources)}")
        old = sum(bool(sources) for _, sources in rows)
        print(f"\n{old} of {len(rows)} results are older than sources they depend on")


if __name__ == "__main__":
    main()
