"""Processes that tokenize: fresh Python processes that read pieces from a pipe and write arrays to another.

They import neither the main program, so that it needs no `if __name__ == "__main__"`, nor JAX. A worker ends when its
pipe does: none is left when the main process is killed.
"""

from __future__ import annotations

import collections
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxscale.data.encoded import Encoded
from jaxscale.data.pieces import Divided, Piece
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, JaxscaleError

AHEAD = 2
"""Pieces that are read ahead, for each process."""

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jaxscale.data.workers import serve; serve()"


class CannotStart(Exception):
    """Why other processes cannot tokenize a corpus."""


class WorkerEnded(DataError):
    """A process that tokenizes was killed."""


class Workers:
    """A pool of processes for one corpus; a context manager that ends them.

    Args:
      corpus: the corpus.
      tokenizer: the tokenizer.
      count: number of processes.

    Raises:
      CannotStart: the corpus or the tokenizer cannot be pickled, or not be loaded by another process.
    """

    def __init__(self, corpus: Divided, tokenizer: Tokenizer, count: int):
        self.count, self._idle = count, queue.SimpleQueue[_Worker]()
        self._all: list[_Worker] = []
        try:
            job = pickle.dumps((corpus, tokenizer))
        except Exception as error:  # whatever an object's own method raises
            raise CannotStart(str(error)) from error
        try:
            self._all += [_Worker() for _ in range(count)]
            for worker in self._all:
                worker.send(job)
            for worker in self._all:
                worker.receive()
                self._idle.put(worker)
        except (OSError, JaxscaleError, CannotStart) as error:
            self.close()
            raise CannotStart(str(error)) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for worker in self._all:
            worker.end()

    def map(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Encoded]]:
        """Yield each piece and its tokens, in the order of the pieces; at most `AHEAD` for each process are in memory.

        Args:
          pieces: the pieces.

        Raises:
          DataError: what a process raised, or a process was killed.
        """
        threads = ThreadPoolExecutor(self.count, "tokenize")
        waiting: collections.deque[tuple[Piece, Future[Encoded]]] = collections.deque()
        try:
            for piece in pieces:
                waiting.append((piece, threads.submit(self._encode, piece)))
                while len(waiting) > AHEAD * self.count or waiting and waiting[0][1].done():
                    first, result = waiting.popleft()
                    yield first, result.result()
            while waiting:
                first, result = waiting.popleft()
                yield first, result.result()
        finally:
            for _, result in waiting:
                result.cancel()
            if waiting:
                self.close()  # a worker may be busy
            threads.shutdown()

    def _encode(self, piece: Piece) -> Encoded:
        worker = self._idle.get()
        try:
            worker.send(piece)
            return worker.receive()
        finally:
            self._idle.put(worker)


class _Worker:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def send(self, value: Any) -> None:
        assert self.process.stdin is not None
        try:
            pickle.dump(value, self.process.stdin, 5)
            self.process.stdin.flush()
        except (OSError, ValueError):  # the pipe is broken or closed
            raise self._ended() from None

    def receive(self) -> Any:
        assert self.process.stdout is not None
        try:
            kind, value = pickle.load(self.process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            raise self._ended() from None
        if kind == "error":
            raise value
        if kind == "cannot":
            raise CannotStart(value)
        return value

    def _ended(self) -> WorkerEnded:
        code = self.process.wait()
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        memory = " (is the memory full? use fewer processes)" if code == -signal.SIGKILL else ""
        return WorkerEnded(f"a process that tokenizes {ending}{memory}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was in its buffer
                    pass


def serve() -> None:
    """Tokenize the pieces that come on stdin, until it ends; the loop of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the main process ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that a tokenizer that prints does no harm

    def answer(kind: str, value: Any) -> None:
        pickle.dump((kind, value), out, 5)
        out.flush()

    try:
        corpus, tokenizer = pickle.loads(pickle.load(source))
    except EOFError:
        return
    except BaseException as error:
        return answer("cannot", f"{type(error).__name__}: {error}")
    answer("ready", None)
    while True:
        try:
            piece = pickle.load(source)
        except EOFError:
            return
        try:
            result = "encoded", corpus.encode(piece, tokenizer)
        except BaseException as error:
            result = "error", _portable(error)
        try:
            answer(*result)
        except BrokenPipeError:
            os._exit(0)


def _portable(error: BaseException) -> BaseException:
    """Return an error that can be pickled and that keeps its message."""
    if isinstance(error, DataError):
        return DataError(str(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error):
            copy.add_note(f"in a process that tokenizes:\n{''.join(traceback.format_exception(error))}")
            return copy
    except Exception:
        pass
    return RuntimeError("".join(traceback.format_exception(error)))
