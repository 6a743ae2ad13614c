"""A run is never lost: not to a kill, not to damaged bytes, not to other devices. Short forms of
experiments/reliability."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxscale as js
from experiments.reliability import corruption, elastic
from jaxscale.cli import main
from jaxscale.errors import CheckpointError, DamagedCheckpoint
from jaxscale.train.checkpoints.chunks import whole
from jaxscale.train.checkpoints.migrate import MIGRATIONS, SCHEMA
from tests.truth.errors import raises_saying
from tests.truth.long import short
from tests.truth.runs import ROOT, bigram, environment, on_host

pytestmark = pytest.mark.once

SCHEMA1 = Path(__file__).parent / "schema1" / "run.zip"
"""A run of `bigram` by the version before schema 2: its checkpoint 4 by Orbax, and its arrays as `expected.npz`."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What faults are tried on."""
    return corruption.Runs(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def old(tmp_path):
    """That run of schema 1."""
    with zipfile.ZipFile(SCHEMA1) as file:
        file.extractall(tmp_path / "old")
    return js.Run(tmp_path / "old", js.TrainConfig(**bigram(optimizer=js.optim.AdamW())))


@pytest.mark.long
def test_six_kills_lose_at_most_an_interval_and_need_no_cleaning(tmp_path):
    results = tmp_path / "crash.jsonl"
    argv = ["-m", "experiments.reliability.crash", "--kills", "6", "--results", str(results)]
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["faults"] for row in rows] == [[]] * 6, done.stdout + done.stderr
    assert done.returncode == 0 and "6 of 6 lives without a fault" in done.stdout
    assert all(row["from step"] > 0 for row in rows[1:])


@pytest.mark.parametrize("fault", short(4, corruption.FAULTS))
def test_no_fault_in_a_checkpoint_is_silent(runs, fault):
    assert "SILENT" not in {corruption.trial(runs, fault, number, seed=7) for number in range(2)}


def test_a_fault_is_found_by_verify_and_named(runs, tmp_path, capsys):
    assert main(["checkpoint", "verify", str(runs.good)]) == 0
    assert "files agree with their" in capsys.readouterr().out
    copy = Path(corruption.shutil.copytree(runs.good, tmp_path / "copy"))
    (touched,) = corruption.FAULTS["one bit flipped"](runs, copy / "checkpoints" / "4", random.Random(0))
    assert main(["checkpoint", "verify", str(copy)]) == 1
    out = capsys.readouterr().out
    array = touched.parent.relative_to(copy / "checkpoints" / "4" / "tensors")
    assert f"checkpoint 4 in {copy}/checkpoints: the file {touched.name} of the array {array} does not hold" in out
    assert "1 of 2 checkpoints are damaged" in out


def test_a_run_goes_on_from_the_older_checkpoint_and_takes_the_damaged_step_again(runs, tmp_path, caplog):
    copy = Path(corruption.shutil.copytree(runs.good, tmp_path / "copy"))
    corruption.FAULTS["a file deleted"](runs, copy / "checkpoints" / "4", random.Random(0))
    settings = corruption.config(model=corruption.MODEL, layout=corruption.SAVED, steps=6, checkpoint_every=2)
    run = js.fit(settings, run=copy, resume=True, quiet=True)
    assert "is missing; going back to the checkpoint before it" in caplog.text
    assert run.checkpoints.steps() == [2, 4, 6]
    aside = [p for p in run.checkpoints.folder.iterdir() if p.name.startswith("4.damaged-")]
    assert len(aside) == 1, "what was found damaged is kept for a look"
    assert runs.restored(copy, 4) == runs.want[4]


def test_another_program_reads_the_arrays(runs):
    """TensorStore, to which they are Zarr arrays."""
    assert elastic.on_disk(runs.good / "checkpoints" / "4") == runs.want[4]


def test_an_exported_checkpoint_is_restored_by_orbax_bit_for_bit(runs, tmp_path, capsys):
    export = ["checkpoint", "export", str(runs.good), "--out", str(tmp_path / "out")]
    assert main(export) == 0
    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore(tmp_path / "out")
    got = {"/".join(str(k.key) for k in path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    want = js.Run(runs.good).checkpoints
    arrays, leaves = want.arrays(want.steps()[-1]), want.manifest(want.steps()[-1])["leaves"]
    assert got.keys() == leaves.keys()
    for name, x in got.items():
        region = whole(tuple(leaves[name]["shape"]))
        assert np.asarray(x).tobytes() == arrays.read(name, [region])[region].tobytes(), name
    assert main(export) == 2 and "already exists" in capsys.readouterr().err


def test_no_checkpoint_that_is_whole_is_one_sentence(runs, tmp_path):
    copy = Path(corruption.shutil.copytree(runs.good, tmp_path / "copy"))
    for step in ("2", "4"):
        corruption.FAULTS["a file cut short"](runs, copy / "checkpoints" / step, random.Random(0))
    with raises_saying(DamagedCheckpoint, "all checkpoints in", "are damaged", "checkpoint 2", "was written with"):
        runs.restored(copy, None)


@pytest.mark.long
def test_a_run_on_other_devices_reads_each_sample_once_and_restores_every_bit(tmp_path):
    pieces = [(1, 4, "fsdp=4"), (1, 1, "data=1"), (1, 8, "data=2,fsdp=2,tensor=2")]
    (tmp_path / "whole").mkdir()
    whole = elastic.chain(tmp_path / "whole", pieces[1:2], lambda run, *_: run(), steps=6)
    chained = elastic.chain(tmp_path, pieces, lambda run, *_: run(), steps=6)
    assert chained["steps with a sample twice or missing"] == 0 and chained["restored bit for bit"]
    np.testing.assert_allclose(chained["losses"], whole["losses"], rtol=1e-6)


@pytest.mark.parametrize(
    "some",
    [
        ("fsdp=3", "pipeline=2,fsdp=2,tensor=2"),
        pytest.param(
            ("one device", "fsdp=3", "data=2,fsdp=2,tensor=2", "pipeline=2,fsdp=2,tensor=2"),
            marks=pytest.mark.long,
        ),
    ],
    ids="; ".join,
)
def test_a_state_saved_on_any_of_some_layouts_is_restored_on_any(tmp_path, some):
    assert not elastic.pairs(tmp_path, {name: elastic.LAYOUTS[name] for name in some})


def test_a_checkpoint_of_schema_1_goes_on_with_a_sentence(old, capsys):
    expected = dict(np.load(old.path / "expected.npz"))
    run = js.fit(old.config, steps=6, run=old.path, resume=True)
    out = " ".join(capsys.readouterr().out.split())
    assert "is of schema 1, which has no digests: its values are loaded unchecked" in out
    assert run.checkpoints.steps() == [4, 6]
    assert run.checkpoints.manifest(6)["written"] == SCHEMA
    got = run.checkpoints.restore(4, *_shapes(run.config))
    assert {k: v.tobytes() for k, v in on_host(got).items()} == {k: v.tobytes() for k, v in expected.items()}


def test_convert_gives_an_old_checkpoint_digests_and_keeps_every_bit(old, capsys):
    expected = dict(np.load(old.path / "expected.npz"))
    for message in ("checkpoint 4 is converted to schema 2", "checkpoint 4 already has schema 2"):
        assert main(["checkpoint", "convert", str(old.path)]) == 0
        assert message in capsys.readouterr().out
    assert elastic.on_disk(old.path / "checkpoints" / "4") == {k: v.tobytes() for k, v in expected.items()}
    got = old.checkpoints.restore(4, *_shapes(old.config))
    assert {k: v.tobytes() for k, v in on_host(got).items()} == {k: v.tobytes() for k, v in expected.items()}
    assert main(["checkpoint", "verify", str(old.path)]) == 0


def test_a_damaged_checkpoint_of_schema_1_is_not_converted(old, capsys):
    for path in (old.path / "checkpoints" / "4" / "arrays").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:100])
    before = {p: p.read_bytes() for p in (old.path / "checkpoints" / "4" / "arrays").rglob("*") if p.is_file()}
    assert main(["checkpoint", "convert", str(old.path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in before} == before
    assert main(["checkpoint", "verify", str(old.path)]) == 1


def test_every_older_schema_has_its_migration():
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA))


def test_list_and_show_say_what_there_is(runs, capsys):
    assert main(["checkpoint", "list", str(runs.good)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "schema"], ["2", "2"], ["4", "2"]]
    assert main(["checkpoint", "show", str(runs.good), "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "step: 2" in out and "params/embed/weight  float32[64, 64] (vocab, embed)  16,384 bytes" in out


def test_a_step_that_is_not_there_is_answered_with_those_that_are(runs, capsys):
    assert main(["checkpoint", "verify", str(runs.good), "--step", "3"]) == 2
    assert "no finished checkpoint 3" in capsys.readouterr().err


def _shapes(config):
    blueprint = js.step.blueprint_of(config)[0]
    return blueprint.abstract_state(), blueprint.shardings()


def test_an_array_named_outside_of_its_checkpoint_is_refused(runs, tmp_path):
    from jaxscale.train.checkpoints.digest import sealed, unsealed

    copy = Path(corruption.shutil.copytree(runs.good, tmp_path / "copy"))
    path = copy / "checkpoints" / "4" / "manifest.json"
    body = unsealed(path.read_text())
    body["leaves"]["../../secret"] = body["leaves"].pop("step")
    path.write_text(sealed(body))
    with raises_saying(CheckpointError, "'../../secret'", "outside"):
        js.train.checkpoints_in(copy).manifest(4)


def test_the_devices_are_eight():
    assert jax.device_count() == 8, "what stands above counts on it"
