"""Export a run's parameters as a GGUF file, the format of llama.cpp."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from jaxscale.convert.exporting import Blocks, export_target
from jaxscale.errors import CheckpointError
from jaxscale.interop.gguf import check_gguf, write_gguf
from jaxscale.interop.gguf.tokenizer import tokenizer_metadata
from jaxscale.run import Run
from jaxscale.working_copy import as_named, file_to_write, upload_files

log = logging.getLogger("jaxscale")

_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def export_gguf(
    run: Run | str | Path,
    out: str | Path,
    *,
    type: str | None = None,  # noqa: A002
    family: str | None = None,
    step: int | None = None,
    say: Callable[[str], None] = log.warning,
) -> Path:
    """Write a run's parameters and tokenizer as a GGUF file, which llama.cpp and others read.

    Tensors are written one by one; host memory holds one tensor of the output, its sources, and a few chunks. What
    cannot be expressed is refused before anything is written.

    Args:
      run: the run, or its folder.
      out: a file that does not exist yet, NAME.gguf; or its URL in a bucket, to which it is uploaded at the end.
      type: the type of matrices: "f32", "f16", "bf16", "q8_0" or "q4_0"; by default the parameters' own. Norms, biases
        and routers are float32.
      family: the Hugging Face family that names the architecture; see `export_checkpoint`.
      step: the checkpoint's step; the newest by default.
      say: prints a line.

    Returns:
      the file.

    Raises:
      CheckpointError: llama.cpp has no architecture for the model; the type does not divide a matrix.
      RunError: `out` exists already, or the run has no checkpoint.
    """
    run = run if isinstance(run, Run) else Run(run)
    out = file_to_write(out)
    chosen, model, _, length = export_target(run, family, None)
    plan = check_gguf(chosen, model, length, type or _TYPES[model.param_dtype])
    arrays = Blocks(run, run.last_step() if step is None else step)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(plan, arrays.read, out, tokenizer_metadata(run.config.tokenizer, model.vocab, say))
        upload_files(out.parent, [out.name])
    except OSError as e:
        raise CheckpointError(f"{as_named(out)} could not be written: {e.strerror or e}") from e
    return out
