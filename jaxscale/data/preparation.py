"""Preparing a corpus: tokenizing it piece by piece, by several processes, into a token file.

Documents are appended in order to an unfinished folder beside the token file, with a journal of finished pieces. After
a crash the next preparation goes on behind the last whole piece. The result has the same bytes whatever the number of
processes and of interruptions.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jaxscale.data.duplicates import SeenTexts
from jaxscale.data.encoded import TEXT_DIGEST, Encoded
from jaxscale.data.journal import Counts, Finished, Journal, piece_key
from jaxscale.data.pieces import Divided, Piece
from jaxscale.data.progress import Meter
from jaxscale.data.storage import FORMATS, TokenFile
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.data.workers import CannotStart, WorkerEnded, Workers
from jaxscale.data.writing import TEXTS, TokenWriter, file_sizes, publish, remove_old
from jaxscale.errors import DataError
from jaxscale.seals import DIGESTS, NEW

log = logging.getLogger("jaxscale")

SMALL = 2**24
"""Bytes of text up to which one process tokenizes, since others would take longer to start."""

ABANDONED = 7 * 86400.0
"""Seconds after which an unfinished folder is removed when another corpus is prepared beside it."""

OTHER_HOST = 60.0
"""Seconds without a write after which another host no longer works on an unfinished folder."""


def prepare(
    folder: str | Path,
    corpus: Divided,
    tokenizer: Tokenizer,
    *,
    processes: int | None = None,
    unfinished: str | None = None,
) -> TokenFile:
    """Tokenize a corpus into a token file, and open it.

    What a killed process has finished is in an unfinished folder beside it, from which the next call goes on. If
    another process prepares the same folder, this one waits for it.

    Args:
      folder: the folder to write. If it exists, it is opened.
      corpus: the corpus.
      tokenizer: the tokenizer.
      processes: number of processes that tokenize; `None` is the corpus's own, or one for each core.
      unfinished: name of the unfinished folder; by default that of the folder, with `.unfinished`.

    Raises:
      DataError: the corpus cannot be read or tokenized, has no document, or a process was killed.
      OSError: the folder cannot be written.
    """
    folder = Path(folder).expanduser()
    remove_old(folder.parent, ".*.unfinished", ABANDONED)
    partial = folder.with_name(unfinished or f".{folder.name}.unfinished")
    count = processes or corpus.processes or cores()
    drop = corpus.duplicates == "drop"
    while not folder.exists():
        with _alone(partial) as alone:
            if not alone:
                continue
            if folder.exists():  # finished while this process waited
                shutil.rmtree(partial, ignore_errors=True)
                continue
            header = f"{FORMATS[corpus.masked]} {NEW} {tokenizer.fingerprint} {drop} {corpus.origin()}"
            preparation = _Preparation(partial, corpus, tokenizer, drop, header)
            try:
                preparation.run(count)
            except WorkerEnded as error:
                raise DataError(
                    f"{error}; start again to go on from {preparation.writer.counts.documents:,} finished documents"
                ) from error
            finally:
                if not preparation.useful:
                    shutil.rmtree(partial, ignore_errors=True)
            half_written = partial.glob(".*.partial")  # by a process that was killed
            for left in (partial / _OWNER, preparation.journal.path, *half_written):
                left.unlink(missing_ok=True)
            publish(partial, folder)
            (folder / _LOCK).unlink(missing_ok=True)  # not before: who holds the lock has the only unfinished folder
            shutil.rmtree(partial, ignore_errors=True)  # does not exist after it was renamed
    return TokenFile(folder)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Preparation:
    """One preparation in an unfinished folder."""

    def __init__(self, partial: Path, corpus: Divided, tokenizer: Tokenizer, drop: bool, header: str):
        self.partial, self.corpus, self.tokenizer, self.drop = partial, corpus, tokenizer, drop
        self.journal, self.seen = Journal(partial, header), SeenTexts()
        self.entries = list(self._intact())
        self.useful = bool(self.entries)  # whether a later preparation gains by what is here
        self.writer: TokenWriter

    def run(self, processes: int) -> None:
        """Tokenize what is not finished, and complete the files."""
        rest = self._unfinished(self.corpus.pieces())
        first = next(rest, None)  # everything before it is finished, so the files can be cut off there
        end = self.entries[-1].end if self.entries else Counts()
        self.journal.write(self.entries)
        self.writer = TokenWriter(self.partial, self.tokenizer, self.corpus.masked, self.drop, end)
        with self.writer, Meter(self.corpus.total(), "tokenizing") as meter:
            if self.drop and end.documents:
                texts = np.memmap(self.partial / TEXTS, np.uint8, "r", shape=(end.documents, TEXT_DIGEST))
                self.seen.add(np.array(texts))
            meter.skip(self.skipped)
            pieces = itertools.chain([] if first is None else [first], rest)
            for piece, part in self._encoded(pieces, processes):
                self._append(piece, part)
                meter.advance(piece.size, len(part.lengths), len(part.tokens))
            counts = self.writer.counts
            self.useful &= counts.documents > 0
            more = {"text": {"bytes": counts.size}} if counts.size else {}
            if self.drop:
                more["text"] = {"bytes": counts.size, "duplicates": counts.duplicates}
            self.writer.finish(self.corpus.name, more)

    def _append(self, piece: Piece, part: Encoded) -> None:
        duplicates = 0
        if self.drop:
            assert part.texts is not None
            new = self.seen.add(part.texts)
            duplicates = len(new) - int(new.sum())
            part = part.only(new) if duplicates else part
        digest = self.writer.append(part, duplicates)
        self.journal.append(Finished(piece_key(piece.key), self.writer.counts, digest))
        self.useful = True

    def _encoded(self, pieces: Iterator[Piece], processes: int) -> Iterator[tuple[Piece, Encoded]]:
        """Yield pieces and their tokens, in order."""
        if processes > 1:
            some, size = [], 0
            for piece in pieces:
                some.append(piece)
                size += piece.text
                if size > SMALL:
                    break
            pieces = itertools.chain(some, pieces)
            if size > SMALL:
                try:
                    workers = Workers(self.corpus, self.tokenizer, processes)
                except CannotStart as reason:
                    log.warning(
                        "one process tokenizes '%s', since others cannot load the tokenizer '%s' (%s); define it in a "
                        "module that can be imported", self.corpus.name, self.tokenizer.name, reason,
                    )  # fmt: skip
                else:
                    with workers:
                        yield from workers.map(pieces)
                    return
        for piece in pieces:
            yield piece, self.corpus.encode(piece, self.tokenizer)

    def _unfinished(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pass over the pieces at the start that are finished, and forget what was finished after another piece."""
        rest, done, self.skipped = iter(pieces), 0, 0
        for piece in rest:
            if done < len(self.entries) and self.entries[done].key == piece_key(piece.key):
                done += 1
                self.skipped += piece.size
                continue
            del self.entries[done:]
            yield piece
            yield from rest
            return
        del self.entries[done:]

    def _intact(self) -> Iterator[Finished]:
        """Yield the finished pieces up to the first one whose content is not what was written."""
        start, size = Counts(), (self.tokenizer.vocab_size, self.corpus.masked, self.drop)
        for entry in self.journal.read():
            digests = []
            for (name, low), high in zip(
                file_sizes(start, *size).items(), file_sizes(entry.end, *size).values(), strict=True
            ):
                try:
                    with open(self.partial / name, "rb") as file:
                        file.seek(low)
                        digests.append(DIGESTS[NEW](file.read(high - low)))
                except OSError:
                    return
            if " ".join(digests) != entry.digest:
                return
            yield entry
            start = entry.end


_LOCK, _OWNER = "lock", "owner"


@contextlib.contextmanager
def _alone(partial: Path) -> Iterator[bool]:
    """Make an unfinished folder and hold its lock; yields False if it was removed while this process waited."""
    try:
        import fcntl
    except ImportError:  # Windows
        partial.mkdir(parents=True, exist_ok=True)
        yield True
        return
    partial.mkdir(parents=True, exist_ok=True)
    try:
        lock = open(partial / _LOCK, "ab")
    except FileNotFoundError:  # removed in the meantime
        yield False
        return
    with lock as file:
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    log.warning(
                        "waiting for another process, which is preparing %s", partial.name[1:].rpartition(".")[0]
                    )
                waited = True
                time.sleep(0.1)
        try:
            same = os.fstat(file.fileno()).st_ino == (partial / _LOCK).stat().st_ino
        except FileNotFoundError:
            same = False
        if same:
            _wait_for_other_host(partial)
            (partial / _OWNER).write_text(socket.gethostname())
        yield same


def _wait_for_other_host(partial: Path) -> None:
    """Wait until no other host writes to the folder, for file systems whose locks are of one host alone."""
    owner = partial / _OWNER
    while owner.exists() and owner.read_text() != socket.gethostname():
        files = [path.stat().st_mtime for path in partial.iterdir() if path.name != _LOCK]
        if time.time() - max(files, default=0) > OTHER_HOST:
            break
        time.sleep(1)
