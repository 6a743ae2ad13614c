"""Runs trials: `python -m jaxscale.sweep.worker JOB.json` runs one, `--serve` those that its parent names.

The process of a pool reads its parent's words line by line and answers each when it is done. When the parent is gone,
its words end, and so does the process: it stops as if asked to, and is not waited for long.
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
"""Seconds that a trial has to stop in once the sweep that started it is gone."""


@dataclasses.dataclass
class _Server:
    """One process of a pool.

    Args:
      answers: where it says which job is done.
    """

    answers: IO[str]
    stopping: int | None = None
    gone: bool = False

    def listen(self, words: IO[str], jobs: list[Path], more: threading.Condition) -> None:
        """Reads the parent's words until they end."""
        for line in words:
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
        """Runs what it is told to, one at a time."""
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
            jax.clear_caches()  # the programs of a trial are of no use to the next, which reads them off the disk
            gc.collect()
            print(f"done {job.trial.id}", file=self.answers, flush=True)


def main(argv: list[str]) -> int:
    """Does it."""
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
