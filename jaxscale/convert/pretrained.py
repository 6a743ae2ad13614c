"""Checkpoints of other programs made run folders of ours."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxscale import config as gin_config
from jaxscale.convert.exporting import export_checkpoint
from jaxscale.errors import RunError
from jaxscale.interop import Companions, Pretrained, local_folder, open_pretrained
from jaxscale.layout import Layout, shardings_of
from jaxscale.run import Run
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import describe_model
from jaxscale.train.checkpoints import digest
from jaxscale.train.checkpoints.journal import Journal
from jaxscale.train.checkpoints.lazily import unread
from jaxscale.train.checkpoints.manifest import leaves_of
from jaxscale.train.checkpoints.migrate import SCHEMA
from jaxscale.train.checkpoints.read import Arrays, place
from jaxscale.train.checkpoints.write import Save
from jaxscale.train.files import INFO, write_json
from jaxscale.train.folders import lock
from jaxscale.train.run import HF, about, checkpoints_in, take_companions, write_config

__all__ = ["export_checkpoint", "import_checkpoint", "read_pretrained", "write_run"]

log = logging.getLogger("jaxscale")

STEP = 0
"""Of the checkpoint that an import writes."""

_UNFINISHED = "importing"
_JOURNAL = "import.jsonl"
_LENGTH = 1024  # of rows, where the model was made for longer ones


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    layout: Layout | str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    adapters: str | Path | None = None,
    say: Callable[[str], None] = log.warning,
) -> Run:
    """Makes a run folder of a Hugging Face checkpoint: `load(out)` is then a run with parameters and a tokenizer.

    Tensors are read, turned and written chunk by chunk: host memory holds one of theirs and the chunks under way.
    Names and shapes are checked before anything is written. An import that was interrupted goes on when it is started
    again; a folder that holds anything else is left as it is.

    Args:
      source: a folder with config.json and safetensors, or a name on the Hugging Face Hub.
      out: the run folder.
      layout: what the run is laid out by, such as "tensor=4"; the checkpoint is cut as its shards are, and can be read
        onto any other.
      dtype: see `open_pretrained`.
      revision: of a name on the Hub.
      adapters: a folder of PEFT's, or a name on the Hub; they are added to the weights, in the type of those.
      say: takes a sentence for the user.

    Raises:
      CheckpointError: see `open_pretrained`.
      LayoutError: the layout does not divide a tensor.
      RunError: `out` is there already, and no unfinished import of the same files.
    """
    layout = Layout(layout) if isinstance(layout, str) else layout
    added = None if adapters is None else local_folder(adapters)
    found = open_pretrained(local_folder(source, revision), dtype=dtype, adapters=added, say=say)
    facts = {"source": str(found.folder.absolute()), "family": found.family.model_type}
    facts |= {} if added is None else {"adapters": str(added.absolute())}
    mark = json.dumps([found.arrays.tensors.fingerprint(), found.values])
    return write_run(
        out, _settings(found, Path(out), layout), found.arrays, hf=found.folder, facts=facts, mark=mark, say=say
    )


def write_run(
    out: str | Path,
    config: TrainConfig,
    arrays: Arrays,
    *,
    hf: Path | None,
    facts: dict[str, Any],
    mark: str,
    status: str = "imported",
    say: Callable[[str], None] = log.warning,
) -> Run:
    """Makes a run folder of settings and parameters that are somewhere else, chunk by chunk.

    Args:
      out: the folder.
      config: the run's settings; its layout cuts the checkpoint.
      arrays: where the parameters are, by the names of a checkpoint ("params/embed/weight"), of the model's dtypes.
      hf: the folder whose companions (tokenizer.json and so on) go with it, or `None`.
      facts: what `run.json` says beside the usual, such as "source".
      mark: of the values: one that was interrupted is gone on with when this and the settings are the same.
      status: what `run.json` calls it in the end.
      say: takes a sentence for the user.

    Raises:
      LayoutError: the layout does not divide a tensor.
      RunError: `out` is there already, and nothing unfinished of the same.
    """
    if jax.process_count() > 1:
        raise RunError("such a folder is written by one process; start it on one host, into a folder that all see")
    run = Run(out, config)
    _, infos = describe_model(config.model)
    shardings = shardings_of(infos, config.layout)
    mark = hashlib.sha256(f"{mark} {gin_config.dumps('train', config.values())}".encode()).hexdigest()
    _claim(run.path, mark, say)
    with lock(run.path):
        if not (run.path / "run.json").is_file():
            _begin(run, {**facts, "mark": mark})
        if hf is not None:
            take_companions(hf, run.path)
        write_config(run.path, run.config, STEP)
        _write(run, arrays, infos, shardings)
        _finish(run, status)
    return run


def read_pretrained(found: Pretrained, layout: Layout | None) -> Any:
    """The parameters of an open folder, straight onto the shards of a layout, and nothing on disk.

    Raises:
      LayoutError: the layout does not divide a tensor.
    """
    _, infos = describe_model(found.config)
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = shardings_of(infos, layout) or jax.tree.map(lambda _: one, infos)
    return jax.tree.map(lambda i, s: place(found.arrays, f"params/{i.path}", i, s), infos, where)


def _settings(found: Pretrained, out: Path, layout: Layout | None) -> TrainConfig:
    told: dict[str, Any] = dict(model=found.config, layout=layout, seq_len=min(found.length, _LENGTH))
    if (found.folder / "tokenizer.json").is_file():
        own = Companions(found.folder).tokenizer
        told["tokenizer"] = dataclasses.replace(own, path=str((out / HF / "tokenizer.json").absolute()))
    return TrainConfig(**told)


def _claim(path: Path, mark: str, say: Callable[[str], None]) -> None:
    """Makes the folder, or takes up an unfinished import of the same.

    Raises:
      RunError: it holds something else, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        there = [p.name for p in path.iterdir() if p.name != ".lock"]
    except OSError as e:
        raise RunError(f"cannot make the run folder {path}: {e.strerror}") from e
    if not there:
        return
    info = Run(path).info if (path / INFO).exists() else {}
    if info.get("status") == _UNFINISHED:
        if info.get("mark") != mark:
            raise RunError(
                f"{path} holds an unfinished import of {info.get('source', 'something')} that began with other files "
                "or settings; remove it, or name another folder"
            )
        say(f"{path} holds an unfinished import; going on with it")
        return
    raise RunError(f"{path} is there already; name another folder")


def _begin(run: Run, facts: dict[str, Any]) -> None:
    own = {"id": os.urandom(8).hex(), **about(run.config, ""), "status": _UNFINISHED, "step": STEP, **facts}
    del own["data"], own["loss"]  # of training, of which there was none
    own["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_json(run.path / INFO, own)


def _write(run: Run, source: Arrays, infos: Any, shardings: Any) -> None:
    every = {f"params/{i.path}": i for i in jax.tree.leaves(infos)}
    where = dict(zip(every, jax.tree.leaves(shardings), strict=True)) if shardings else dict.fromkeys(every)
    arrays = {n: unread(source, n, i.shape, i.dtype, where[n]) for n, i in every.items()}
    store = checkpoints_in(run.path)
    if store.steps():
        return  # killed between the checkpoint and the last word on it
    layout = run.config.layout
    manifest = {
        "schema": SCHEMA,
        "step": STEP,
        "run": store.run,
        "arrays": "chunks",
        "digest": digest.NEW,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "leaves": leaves_of({}, arrays, infos),
        "layout": None if layout is None else str(layout),
        "data": None,
    }
    session = run.info["id"][:8]
    Save(store.folder, session, manifest, arrays, 0, 1, 1, None, True, Journal(run.path / _JOURNAL)).run()


def _finish(run: Run, status: str) -> None:
    info = {k: v for k, v in run.info.items() if k != "mark"}
    info |= {"status": status, "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_json(run.path / INFO, info)
    (run.path / _JOURNAL).unlink(missing_ok=True)
