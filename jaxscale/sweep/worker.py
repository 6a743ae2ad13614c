"""Process that runs trials: `python -m jaxscale.sweep.worker JOB.json` runs one, `--serve` those its parent names.

A pool's worker reads commands ("job FILE", "stop ID") from its standard input, a line each, and answers when a job is
done. When its parent exits, the input ends: the worker stops its trial, or is ended after `GRACE` seconds.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO

from jaxscale.import_path import append_current_folder
from jaxscale.sweep.jobs import read_job, run_job

GRACE = 10.0
"""Seconds that a trial has to stop once the sweep that started it is gone."""


@dataclasses.dataclass
class _Server:
    """One worker process of a pool.

    Args:
      answers: the stream to write "done ID" to.
      stopping: id of the trial that shall stop.
      gone: whether the parent has exited.
    """

    answers: IO[str]
    stopping: int | None = None
    gone: bool = False

    def listen(self, commands: IO[str], jobs: list[Path], more: threading.Condition) -> None:
        """Read the parent's commands until they end."""
        for line in commands:
            word, _, rest = line.rstrip("\n").partition(" ")
            with more:
                if word == "job":
                    self.stopping = None
                    jobs.append(Path(rest))
                else:
                    self.stopping = int(rest)
                more.notify()
        with more:
            self.gone = True
            more.notify()
        time.sleep(GRACE)
        os._exit(1)

    def serve(self) -> None:
        """Run the jobs that the parent sends, one at a time."""
        import gc

        import jax

        jobs: list[Path] = []
        more = threading.Condition()
        threading.Thread(target=self.listen, args=(sys.stdin, jobs, more), daemon=True).start()
        while True:
            with more:
                while not jobs and not self.gone:
                    more.wait()
                if self.gone:
                    return
                file = jobs.pop(0)
            with file.with_suffix(".log").open("ab", buffering=0) as log:
                sys.stdout.flush()
                sys.stderr.flush()
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            job = read_job(file)
            run_job(job, stop=lambda id=job.trial.id: self.gone or self.stopping == id)
            jax.clear_caches()  # frees memory; the next trial reads compiled programs from the cache on disk
            gc.collect()
            print(f"done {job.trial.id}", file=self.answers, flush=True)


def main(argv: list[str]) -> int:
    """Run one job, or serve a pool; returns the exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    append_current_folder()  # as the command line does
    if argv != ["--serve"]:
        run_job(read_job(Path(argv[0])))
        return 0
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _Server(answers).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
