"""Import checkpoints of other programs as run folders."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxscale import config as gin_config
from jaxscale.convert.exporting import export_checkpoint
from jaxscale.errors import RunError
from jaxscale.interop import Companions, Pretrained, local_folder, open_pretrained
from jaxscale.interop.gguf import is_gguf, write_companions
from jaxscale.interop.kept import FACTS, Kept
from jaxscale.layout import Layout, shardings_of
from jaxscale.run import Run
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import describe_model
from jaxscale.step.stored import stored_infos
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
from jaxscale.working_copy import as_named, local, mirrored

__all__ = ["export_checkpoint", "import_checkpoint", "read_pretrained", "write_run"]

log = logging.getLogger("jaxscale")

STEP = 0
"""Step of the checkpoint that an import writes."""

_UNFINISHED = "importing"
_JOURNAL = "import.jsonl"
_LENGTH = 1024  # train.seq_len of an imported model that supports longer sequences


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    layout: Layout | str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    adapters: str | Path | None = None,
    widen: bool = False,
    say: Callable[[str], None] = log.warning,
) -> Run:
    """Import a Hugging Face checkpoint as a run folder; `load(out)` is then a run with parameters and a tokenizer.

    Tensors are read, converted and written chunk by chunk: host memory holds one source tensor and a few chunks. Names
    and shapes are checked before anything is written. An interrupted import continues when it is started again; a
    folder with anything else in it is left as it is.

    Args:
      source: a folder with config.json and safetensors, also in a bucket; a name on the Hugging Face Hub; or a GGUF
        file, beside which a tokenizer.json may lie.
      out: the run folder.
      layout: the run's layout, such as "tensor=4". Chunks of the checkpoint are its shards; any other layout can read
        them.
      dtype: see `open_pretrained`.
      revision: a branch, tag or commit of a name on the Hub.
      adapters: a PEFT folder, also in a bucket, or a name on the Hub; merged into the weights, in their dtype.
      widen: see `open_pretrained`.
      say: prints a line.

    Returns:
      the run.

    Raises:
      CheckpointError: see `open_pretrained`.
      LayoutError: the layout does not divide a tensor.
      RunError: `out` exists already and is not an unfinished import of the same files.
    """
    layout = Layout(layout) if isinstance(layout, str) else layout
    added = None if adapters is None else local_folder(adapters)
    opened = open_pretrained(local_folder(source, revision), dtype=dtype, adapters=added, widen=widen, say=say)
    facts: dict[str, Any] = {"source": as_named(opened.folder.absolute()), "family": opened.family.model_type}
    facts |= {} if added is None else {"adapters": as_named(added.absolute())}
    if isinstance(opened.arrays, Kept):
        facts |= {FACTS: opened.arrays.facts}
    mark = json.dumps([opened.arrays.tensors.fingerprint(), opened.values])
    with _companions(opened, say) as hf:
        config = _settings(opened, hf, local(out, update=False), layout)
        return write_run(out, config, opened.arrays, hf=hf, facts=facts, mark=mark, say=say)


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
    """Write a run folder from settings and a source of parameters, chunk by chunk.

    Args:
      out: the folder.
      config: the run's settings; chunks of the checkpoint are the shards of its layout.
      arrays: source of the parameters, by the names of a checkpoint ("params/embed/weight"), with the model's dtypes;
        with `config.stored` those of its arrays ("params/runs/0/blocks/0/attn/q/kernel/codes"), see
        `jaxscale.step.stored.stored_infos`.
      hf: a folder whose tokenizer.json and so on to copy, or `None`.
      facts: further facts for `run.json`, such as "source".
      mark: identifies the values: an interrupted write continues only if this and the settings are the same.
      status: the final status in `run.json`.
      say: prints a line.

    Returns:
      the run.

    Raises:
      LayoutError: the layout does not divide a tensor.
      RunError: `out` exists already and is not an unfinished write of the same; there are several processes.
    """
    if jax.process_count() > 1:
        raise RunError("only one process can import; run it on one host, into a folder that all hosts share")
    run = Run(out, config)
    infos = stored_infos(config)
    shardings = shardings_of(infos, config.layout)
    mark = hashlib.sha256(f"{mark} {gin_config.dumps('train', config.values())}".encode()).hexdigest()
    _claim(run.path, mark, say)
    with lock(run.path), mirrored(run.path, update=True) as run.mirror:
        if not (run.path / "run.json").is_file():
            _begin(run, {**facts, "mark": mark})
        if hf is not None:
            take_companions(hf, run.path)
        write_config(run.path, run.config, STEP)
        _write(run, arrays, infos, shardings)
        _finish(run, status)
    return run


def read_pretrained(pretrained: Pretrained, layout: Layout | None) -> Any:
    """Read the parameters of a Hugging Face folder onto the shards of a layout, without writing a run folder.

    Args:
      pretrained: from `open_pretrained`.
      layout: where to place them; `None` is one device.

    Returns:
      a tree of `jax.Array`s.

    Raises:
      LayoutError: the layout does not divide a tensor.
    """
    _, infos = describe_model(pretrained.config)
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = shardings_of(infos, layout) or jax.tree.map(lambda _: one, infos)
    return jax.tree.map(lambda i, s: place(pretrained.arrays, f"params/{i.path}", i, s), infos, where)


@contextmanager
def _companions(opened: Pretrained, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield the folder with the files beside the weights; that of a GGUF file is made for the time of the import."""
    if not is_gguf(opened.folder):
        yield opened.folder
        return
    with tempfile.TemporaryDirectory() as made:
        write_companions(opened.folder, opened.values, Path(made), say)
        yield Path(made)


def _settings(opened: Pretrained, hf: Path, out: Path, layout: Layout | None) -> TrainConfig:
    settings: dict[str, Any] = dict(
        model=opened.config, layout=layout, seq_len=min(opened.length, _LENGTH), stored=opened.stored
    )
    if (hf / "tokenizer.json").is_file():
        own = Companions(hf).tokenizer
        settings["tokenizer"] = dataclasses.replace(own, path=str((out / HF / "tokenizer.json").absolute()))
    return TrainConfig(**settings)


def _claim(path: Path, mark: str, say: Callable[[str], None]) -> None:
    """Make the folder, or accept one with an unfinished import of the same.

    Raises:
      RunError: it has something else in it, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        existing = [p.name for p in path.iterdir() if p.name != ".lock"]
    except OSError as e:
        raise RunError(f"cannot make the run folder {path}: {e.strerror}") from e
    if not existing:
        return
    info = Run(path).info if (path / INFO).exists() else {}
    if info.get("status") == _UNFINISHED:
        if info.get("mark") != mark:
            raise RunError(
                f"{as_named(path)} holds an unfinished import of {info.get('source', 'something')} that began with "
                "other files or settings; remove it, or name another folder"
            )
        say(f"{as_named(path)} holds an unfinished import; continuing it")
        return
    raise RunError(f"{as_named(path)} already exists; name another folder")


def _begin(run: Run, facts: dict[str, Any]) -> None:
    own = {"id": os.urandom(8).hex(), **about(run.config, ""), "status": _UNFINISHED, "step": STEP, **facts}
    del own["data"], own["loss"]  # this run was not trained
    own["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_json(run.path / INFO, own)


def _write(run: Run, source: Arrays, infos: Any, shardings: Any) -> None:
    every = {f"params/{i.path}": i for i in jax.tree.leaves(infos)}
    where = dict(zip(every, jax.tree.leaves(shardings), strict=True)) if shardings else dict.fromkeys(every)
    arrays = {n: unread(source, n, i.shape, i.dtype, where[n]) for n, i in every.items()}
    store = checkpoints_in(run.path, before_publish=run.mirror.flush)
    if store.steps():
        return  # killed after the checkpoint was written, before `_finish`
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
    Save(store.place, session, manifest, arrays, 0, 1, 1, None, True, Journal(run.path / _JOURNAL)).run()


def _finish(run: Run, status: str) -> None:
    info = {k: v for k, v in run.info.items() if k != "mark"}
    info |= {"status": status, "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_json(run.path / INFO, info)
    (run.path / _JOURNAL).unlink(missing_ok=True)
