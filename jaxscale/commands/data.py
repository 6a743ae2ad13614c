"""`jaxscale data`: shows the documents, statistics and rows of a corpus, and prepares it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxscale.buckets import Bucket, BucketError, failure, is_url
from jaxscale.commands.shared import TEXT, import_argument, load, no_bindings
from jaxscale.errors import ConfigError, DataError, near
from jaxscale.working_copy import local

if TYPE_CHECKING:
    from jaxscale.data import Corpus, Tokenizer

SEQ_LEN = 1024
"""Tokens of a row, where no config says it."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "data",
        help="show the documents, statistics and rows of a corpus, or prepare it",
        usage="jaxscale data [show | prepare] WHAT [options]",
        description="Shows what training would read: statistics of the documents, the first ones as text, and the "
        "first rows of a batch.\nThe corpus is tokenized into the cache first, as by a run, or with `prepare` into a "
        "folder of its own.\nWHAT is a gin file or a run, a token file, a folder of Hugging Face datasets, or files: "
        ".jsonl (also .gz and .zst),\n.parquet, or any text; a glob in quotes.\n\n"
        "  jaxscale data experiments/demo.gin\n"
        "  jaxscale data 'shards/*.jsonl.zst' --tokenizer tokenizer.json --seq-len 4096\n"
        "  jaxscale data prepare 'shards/*.jsonl.zst' --tokenizer tokenizer.json --out tokens",
        formatter_class=TEXT,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, prog="jaxscale data")
    show = actions.add_parser("show", help="show it; the default", description="Show what training would read.")
    make = actions.add_parser(
        "prepare",
        help="tokenize it",
        description="Tokenize the corpus by several processes: into a folder, or without --out into the cache, where a "
        "run finds it.\nA preparation that was killed goes on where it was.",
        formatter_class=TEXT,
    )
    for one in (show, make):
        one.add_argument(
            "what", metavar="WHAT", help="a gin file, a run, a token file, a folder or files of a corpus; or their URL"
        )
        import_argument(one)
        one.add_argument(
            "--tokenizer", metavar="FILE", help="a tokenizer.json (default: that of the config, or else bytes)"
        )
        one.add_argument("--field", metavar="NAME", help="the field or column with the text (default: text)")
        one.add_argument(
            "--processes", type=int, metavar="N", help="processes that tokenize (default: one for each core)"
        )
        one.add_argument(
            "--duplicates", metavar="keep|drop", help="drop documents with the text of an earlier one (default: keep)"
        )
    show.add_argument("--seq-len", type=int, metavar="N", help=f"tokens of a row (default: the config's, or {SEQ_LEN})")
    show.add_argument("--packing", metavar="NAME", help="how documents fill rows: stream or fit")
    show.add_argument("--documents", type=int, default=3, metavar="N", help="documents to print (default: 3)")
    show.add_argument("--rows", type=int, default=2, metavar="N", help="rows to print (default: 2)")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run_command=run, action_command=_show)
    make.add_argument("--out", metavar="FOLDER", help="the token file to write, a folder or a URL; it must not exist")
    make.set_defaults(run_command=run, action_command=_prepare)
    whole = parser.parse_known_args

    def with_action(words: list[str], namespace: Any = None) -> Any:
        """Parse `data WHAT` as `data show WHAT`."""
        named = words[:1] in (["show"], ["prepare"]) or {"-h", "--help"} & set(words[:1]) or not words
        if not named and len(words) > 1 and not words[1].startswith("-") and re.fullmatch("[a-z]+", words[0]):
            raise ConfigError(f"jaxscale data has no action '{words[0]}'{near(words[0], ['show', 'prepare'])}")
        return whole(words if named else ["show", *words], namespace)

    parser.parse_known_args = with_action


@dataclasses.dataclass(frozen=True)
class Subject:
    """What the command is about.

    Args:
      corpus: the corpus.
      tokenizer: its tokenizer; `None` if it is unknown.
      seq_len: tokens of a row.
      packing: how documents fill rows.
      seed: seed of the order of rows.
      further: corpora that a config evaluates on, too.
    """

    corpus: Corpus
    tokenizer: Tokenizer | None
    seq_len: int = SEQ_LEN
    packing: str = "stream"
    seed: int = 0
    further: tuple[Corpus, ...] = ()


def run(args: argparse.Namespace, bindings: list[str]) -> int:
    """Run the action; returns the exit code 0."""
    subject = _subject(args, bindings)
    return args.action_command(subject, args)


def _subject(args: argparse.Namespace, bindings: list[str]) -> Subject:
    from jaxscale import data

    path = Path(args.what).expanduser()
    own = local(args.what) / "config.gin" if _has(args.what, "config.gin") else None
    chosen: Tokenizer | None = None
    if args.tokenizer is not None:
        chosen = data.HFTokenizer(args.tokenizer)
        _ = chosen.vocab_size  # raises if it cannot be read
    if own is not None or path.suffix == ".gin":
        settings = load(own, argparse.Namespace(config=args.what, mesh=None, pipeline=None), bindings)
        further = tuple(settings.evaluate_on.values())
        subject = Subject(
            settings.data, chosen or settings.tokenizer, settings.seq_len, settings.packing, settings.seed, further
        )
    else:
        no_bindings(args, bindings)
        if _has(args.what, "meta.json"):
            chosen = chosen or _writer_of(args.what)
        subject = Subject(_corpus_of(args.what, path, args.field), chosen or _default(args.what))
    fields = {"seq_len": getattr(args, "seq_len", None), "packing": getattr(args, "packing", None)}
    subject = dataclasses.replace(subject, **{k: v for k, v in fields.items() if v is not None})
    return dataclasses.replace(subject, corpus=_changed(subject.corpus, args))


def _has(what: str, name: str) -> bool:
    """Whether a folder, of a disk or a bucket, has a file."""
    if not is_url(what):
        return (Path(what).expanduser() / name).is_file()
    try:
        return not has_magic(what) and Bucket(what).exists(name)
    except BucketError as e:
        raise failure(DataError, e) from None


def _corpus_of(what: str, path: Path, field: str | None) -> Corpus:
    """Return the corpus of a path or a glob that is no config."""
    from jaxscale import data
    from jaxscale.data.files import matching
    from jaxscale.data.lines import uncompressed

    field_or_text = "text" if field is None else field
    if _has(what, "meta.json"):
        return data.token_file(what)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return data.hf_dataset(what, field=field_or_text)
    if path.is_dir():
        raise DataError(f"{what} is a folder; name its files by a glob in quotes, such as '{path}/**/*.jsonl'")
    suffix = Path(uncompressed(path.name)).suffix
    if has_magic(suffix):  # such as *.jsonl*, for plain and compressed files
        suffixes = sorted({Path(uncompressed(name)).suffix for name, _ in matching(what)})
        if len(suffixes) > 1 and {".jsonl", ".ndjson", ".parquet"} & {*suffixes}:
            raise DataError(
                f"{what} matches files that end in {', '.join(suffixes)}; name one kind, as in '*{suffixes[0]}'"
            )
        suffix = suffixes[0]
    if suffix in (".jsonl", ".ndjson"):
        return data.jsonl_files(what, field_or_text)
    if suffix == ".parquet":
        return data.parquet_files(what, field_or_text)
    if field is not None:
        raise ConfigError(f"--field {field} has no effect on text files; leave it out")
    return data.text_files(what)


def _changed(corpus: Corpus, args: argparse.Namespace) -> Corpus:
    """Return the corpus with the options' number of processes and treatment of duplicates."""
    changes = {name: getattr(args, name) for name in ("processes", "duplicates") if getattr(args, name) is not None}
    names: list[str] = []
    if dataclasses.is_dataclass(corpus):
        names = [f.name for f in dataclasses.fields(corpus)]
    for name in changes:
        if name not in names:
            raise ConfigError(f"--{name} has no effect on the corpus '{corpus.name}'; leave it out")
    return dataclasses.replace(corpus, **changes) if changes else corpus  # type: ignore[type-var]


def _default(what: str) -> Tokenizer | None:
    from jaxscale.data import ByteTokenizer

    return None if _has(what, "meta.json") else ByteTokenizer()


def _writer_of(what: str) -> Tokenizer | None:
    """Return the tokenizer that wrote a token file, where nothing but its fingerprint is needed to know it."""
    from jaxscale.data import ByteTokenizer, TokenFile

    bytes_ = ByteTokenizer()
    return bytes_ if TokenFile(what).meta["tokenizer"]["fingerprint"] == bytes_.fingerprint else None


def _prepare(subject: Subject, args: argparse.Namespace) -> int:
    from jaxscale import data
    from jaxscale.units import human_bytes

    corpora = [subject.corpus] if args.out is not None else [subject.corpus, *subject.further]
    parts = [part for corpus in corpora for part, _ in _parts(corpus)]
    if args.out is None:
        files = [_prepared(part, subject.tokenizer) for part in parts]
    else:
        out: str | Path = args.out if is_url(args.out) else Path(args.out).expanduser()
        if _has(args.out, "meta.json") if isinstance(out, str) else out.exists():
            raise DataError(f"{out} already exists; remove it or write to another folder.")
        if len(parts) > 1:
            names = ", ".join(part.name for part in parts)
            raise ConfigError(f"--out is for one corpus, and this is a mixture of {names}; leave out --out")
        if not hasattr(parts[0], "pieces"):
            raise ConfigError(
                f"the corpus '{parts[0].name}' consists of token ids already; there is nothing to prepare"
            )
        assert subject.tokenizer is not None  # of a corpus of texts
        try:
            files = [data.prepare(out, parts[0], subject.tokenizer)]
        except OSError as error:
            raise DataError(f"cannot write {out} ({error.strerror or error}); name another folder.") from error
    for file in files:
        if file is None:
            continue
        size = human_bytes(sum(path.stat().st_size for path in file.folder.iterdir()))
        count = f"{file.meta['documents']:,} documents, {file.meta['tokens']:,} tokens"
        print(f"{file.bucket or file.folder}: {count}, {size}")
        dropped = file.meta.get("text", {}).get("duplicates")
        if dropped is not None:
            print(f"{dropped:,} duplicates were dropped")
    if args.out is not None:
        path = shlex.quote(args.out)
        bindings = f"--gin.train.data=@token_file() --gin.token_file.path={path}"
        if args.tokenizer is not None:
            bindings += f" --gin.train.tokenizer=@HFTokenizer() --gin.HFTokenizer.path={shlex.quote(args.tokenizer)}"
        print(f"train on it with {bindings}", file=sys.stderr)
    return 0


def _parts(corpus: Corpus, later: Sequence[float] | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield the corpora of a mixture, of mixtures in it too, and the share of each as it is written; or the corpus.

    Args:
      corpus: the corpus.
      later: weights of its schedule; `None` are those of the beginning.
    """
    parts = getattr(corpus, "parts", None)
    if parts is None:
        yield corpus, None
        return
    weights = [weight for _, weight in parts] if later is None else list(later)
    numbers = all(isinstance(weight, int | float) for weight in weights)
    for (part, _), weight in zip(parts, weights, strict=True):
        share = weight / sum(weights) if numbers else weight
        for inner, of in _parts(part):
            both = isinstance(share, float) and isinstance(of, float)
            yield inner, share if of is None else share * of if both else f"{share} of {of}"


def _prepared(corpus: Any, tokenizer: Tokenizer | None) -> Any:
    """Return the token file of a corpus, or `None` if it has none."""
    return corpus.prepared(tokenizer) if hasattr(corpus, "prepared") else None


def _show(subject: Subject, args: argparse.Namespace) -> int:
    from jaxscale.commands import data_tables as tables
    from jaxscale.data import Loader
    from jaxscale.data.statistics import statistics

    for name in ("documents", "rows"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name} {getattr(args, name)}: use 0 or more")
    described: list[dict[str, Any]] = []
    schedule = [
        (int(step), [share for _, share in _parts(subject.corpus, weights)])
        for step, weights in getattr(subject.corpus, "schedule", ())
    ]
    for number, (part, share) in enumerate(_parts(subject.corpus)):
        file = _prepared(part, subject.tokenizer)
        about = {
            "corpus": part.name,
            "share": share,
            "folder": None if file is None else str(file.bucket or file.folder),
        }
        if schedule:
            about["schedule"] = [{"from_step": step, "share": shares[number]} for step, shares in schedule]
        if file is not None:
            about["statistics"] = statistics(file, subject.seq_len)
            about["documents"] = tables.first_documents(file, args.documents, subject.tokenizer)
        described.append(about)
    source = subject.corpus.source(subject.tokenizer, seq_len=subject.seq_len, split="train", packing=subject.packing)
    rows = []
    if args.rows:
        rows = tables.rows_of(Loader(source, args.rows, subject.seed).batch_at(0), subject.tokenizer)
    if args.json:
        print(json.dumps({"corpora": described, "rows": rows}, indent=1, default=tables.as_json))
    else:
        tables.show(described, rows, subject, source)
    return 0
