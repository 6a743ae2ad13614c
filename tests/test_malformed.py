"""Malformed folders end in one sentence: the short form of experiments/reliability/malformed.py."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from experiments.reliability.malformed import BAD, CONFIG, Folders, attempt, save_tensors, tried
from jaxscale import config as gin_config
from jaxscale import reading
from jaxscale.errors import CheckpointError, ConfigError, DamagedCheckpoint, DataError, RunError
from jaxscale.interop import open_pretrained
from jaxscale.interop.safetensors import SafeTensors
from jaxscale.run import Run
from jaxscale.sweep import Result
from jaxscale.sweep.comparing.report import report
from jaxscale.train.checkpoints.digest import sealed

READERS = (
    "gin config", "run folder", "report", "sweep folder", "Hugging Face folder", "safetensors", "tokenizer", "adapters",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("malformed"))


@pytest.mark.parametrize("reader", READERS)
def test_what_is_malformed_is_read_right_or_refused_in_a_sentence(folders, reader):
    results = list(tried(folders, reader, range(20)))
    assert not [one for one in results if one[1] in BAD]
    assert {one[1] for one in results} >= {"sentence"}


def test_a_traceback_and_a_hang_are_distinguished_from_a_sentence(monkeypatch):
    monkeypatch.setattr("experiments.reliability.malformed.LIMIT", 0.05)
    pipe = os.pipe()[0]
    assert attempt(lambda: {}["a"], "")[0] == "TRACEBACK"
    assert attempt(lambda: os.read(pipe, 1), "")[0] == "HANG"
    assert attempt(lambda: 1, "1")[0] == "right"


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(folders, tmp_path):
    shutil.copytree(folders.run, tmp_path / "run")
    return tmp_path / "run"


def faults(run):
    return list(Run(run).checkpoints.arrays(0).faults())


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_chunk_that_is_no_file_is_named(run, kind):
    chunk = run / "checkpoints/0/tensors/params/norm/scale/c.0"
    chunk.unlink()
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](chunk)
    message = f"the file c.0 of the array params/norm/scale cannot be read: it is a {kind} and not a file"
    assert message in faults(run)[0]


def test_a_chunk_that_is_a_link_is_read(run):
    chunk = run / "checkpoints/0/tensors/params/norm/scale/c.0"
    chunk.rename(run / "elsewhere")
    chunk.symlink_to(run / "elsewhere")
    assert not faults(run)


LEAF = ("leaves", "params/norm/scale")


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (("leaves",), [], "leaves is \\[\\]"),
        (("schema",), "2", "schema is '2'"),
        (("arrays",), "x", "arrays is 'x', and is one of chunks, orbax"),
        (("digest",), None, "digest is None of chunks"),
        ((*LEAF, "shape"), [10**12], "1 files, but its shape \\[1000000000000\\] has 62500000000 chunks"),
        ((*LEAF, "shape"), [-16], "the shape \\[-16\\]"),
        ((*LEAF, "chunk"), [0], "the chunks \\[0\\]"),
        ((*LEAF, "dtype"), "object", "the dtype 'object'"),
        ((*LEAF, "dtype"), {}, "the dtype {}"),
        ((*LEAF, "axes"), 3, "the axes 3"),
        ((*LEAF, "files"), None, "the files None"),
        (("leaves", "../../x"), {}, "would lie outside of it"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_damaged_though_its_digest_is_right(run, at, value, words):
    file = run / "checkpoints/0/manifest.json"
    body = json.loads(file.read_text())["body"]
    place = body
    for name in at[:-1]:
        place = place[name]
    place[at[-1]] = value
    file.write_text(sealed(body))
    with pytest.raises(DamagedCheckpoint, match=words):
        Run(run).checkpoints.manifest(0)


@pytest.mark.parametrize("name", ["schema", "step", "run", "arrays", "digest", "leaves"])
def test_a_manifest_that_lacks_a_fact_is_damaged_though_its_digest_is_right(run, name):
    file = run / "checkpoints/0/manifest.json"
    body = json.loads(file.read_text())["body"]
    del body[name]
    file.write_text(sealed(body))
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing|schema is None|is of step None"):
        Run(run).checkpoints.manifest(0)


@pytest.mark.parametrize("at", [("schema",), ("step",), ("leaves", "params/norm/scale", "files", "c.0")])
def test_a_manifest_with_a_text_of_thousands_of_letters_is_a_short_sentence(run, at):
    file = run / "checkpoints/0/manifest.json"
    body = json.loads(file.read_text())["body"]
    place = body
    for name in at[:-1]:
        place = place[name]
    place[at[-1]] = "x" * 5000
    file.write_text(sealed(body))
    with pytest.raises(DamagedCheckpoint) as e:
        raise DamagedCheckpoint(faults(run)[0])
    assert len(str(e.value)) < 800


def test_an_objective_of_thousands_of_letters_is_a_short_sentence(folders, tmp_path):
    shutil.copytree(folders.root / "sweep", tmp_path / "sweep")
    (tmp_path / "sweep/sweep.gin").write_text(f"sweep.objective = '{'x' * 5000}'\n")
    with pytest.raises(RunError, match="has a finite x") as e:
        Result(tmp_path / "sweep").best()
    assert len(str(e.value)) < 800


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, "{'a': " * 3000 + "1" + "}" * 3000, "(" * 101 + "1," + "),"])
def test_a_config_that_is_nested_without_need_is_one_short_sentence(text):
    with gin_config.isolated(), pytest.raises(ConfigError) as e:
        gin_config.load(bindings=[f"a = {text}"])
    assert len(str(e.value)) < 800


@pytest.mark.parametrize(
    "name", ["train.optimizer", "train.objective", "train.data", "Transformer.dtype", "Transformer.memory"]
)
def test_a_setting_of_thousands_of_letters_is_shortened_in_the_error(name):
    bindings = ["train.model = @Transformer()", f"{name} = '{'x' * 5000}'"]
    with gin_config.isolated(), pytest.raises(ConfigError, match=r"x \.\.\. x") as e:
        gin_config.load(bindings=bindings)
        gin_config.call("train")
    assert len(str(e.value)) < 800


@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, '{"a": ' * 150 + "1" + "}" * 150])
def test_json_that_is_nested_without_need_is_refused(text):
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        reading.parse_json(text)


def test_a_file_that_includes_itself_under_many_names_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "a.gin").write_text("include 'x/../a.gin'\n")
    with gin_config.isolated(), pytest.raises(ConfigError, match="includes itself"):
        gin_config.load([tmp_path / "a.gin"])


# --- reports ----------------------------------------------------------------------------------------------------------

INFO = {"status": "finished", "started": "2026-01-01T00:00:00+0000", "updated": "2026-01-01T00:01:00+0000"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("run.json", {**INFO, part: value}) for part in ("hardware", "layout", "data", "versions", "flags")
          for value in ([1], "text")),
        ("run.json", {**INFO, "layout": {"mesh": [2, 4]}}),
        ("run.json", {**INFO, "parameters": 10**400}),
        ("run.json", {**INFO, "error": ["a", 1]}),
        ("outcome.json", {"state": {"a": 1}, "seconds": float("nan"), "error": {}}),
        ("outcome.json", {"seconds": float("inf")}),
        ("metrics.jsonl", {"step": float("inf"), "loss": 1.0}),
        ("metrics.jsonl", {"step": 10**30, "loss": 1.0}),
        ("metrics.jsonl", {"step": 4, "loss": 10**400, "tokens_per_second": "fast", "model_flops_per_second": 1}),
        ("metrics.jsonl", {"step": 4, "lo$s_{": 1.5e308, "\ud800": 2.0}),
    ],
)  # fmt: skip
def test_a_run_with_strange_values_does_not_take_a_report_down(tmp_path, name, value):
    for n in range(2):
        run = tmp_path / f"{n}"
        run.mkdir()
        (run / "run.json").write_text(json.dumps(INFO))
        (run / "config.gin").write_text(f"train.lr = 0.{n + 1}\ntrain.seed = {10**400 if n else 0}\n")
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1.5e308}) + "\n" for s in (1, 2)))
    file = tmp_path / "1" / name
    before = file.read_text() if name == "metrics.jsonl" else ""
    file.write_text(before + json.dumps(value) + "\n")
    page = report(tmp_path, tmp_path / "out", pictures=False).read_text()
    assert "<h2>Runs</h2>" in page


def test_labels_of_a_report_are_no_formulas(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "lo$s_{/loss": 1.0, "$\ud800_loss": 2}) + "\n"
    )
    messages = []
    page = report(tmp_path / "run", tmp_path / "out", tell=messages.append)
    assert (page.parent / "curves.png").is_file()
    assert not messages


@pytest.mark.parametrize("name", ["run.json", "config.gin", "metrics.jsonl", "outcome.json", "samples.jsonl", ".lock"])
def test_a_pipe_does_not_hold_a_report_up(folders, tmp_path, name):
    shutil.copytree(folders.root / "sweep" / "000", tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    assert report(tmp_path / "run", tmp_path / "out", pictures=False).is_file()


def test_a_report_is_not_written_over_a_folder_or_a_pipe(folders, tmp_path):
    (tmp_path / "a" / "report.html").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "curves.png")
    for out in ("a", "b"):
        with pytest.raises(RunError, match="not a report of jaxscale.s; name another folder with --out"):
            report(folders.root / "sweep", tmp_path / out, pictures=False)


# --- sweeps -----------------------------------------------------------------------------------------------------------


STRANGE = {"text": "a", "list": [1], "bool": True, "null": None, "huge": 10**400, "object": {"a": 1}}


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
def test_an_objective_that_is_no_number_is_left_out_of_a_sweeps_table(folders, tmp_path, value):
    shutil.copytree(folders.root / "sweep", tmp_path / "sweep")
    with (tmp_path / "sweep/000/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "eval_loss": value}) + "\n")
    sweep = Result(tmp_path / "sweep")
    assert [curve[-1] for curve in (r.curve for r in sweep.records())] == [(3, 0.10000000000000009)] * 3
    assert sweep.best()["eval_loss"] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir])
def test_a_trials_lock_that_is_not_a_file_is_free(folders, tmp_path, kind):
    shutil.copytree(folders.root / "sweep", tmp_path / "sweep")
    kind(tmp_path / "sweep/jobs/000.lock")
    assert [r.state for r in Result(tmp_path / "sweep").records()] == ["finished", "finished", "waiting"]


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


@pytest.fixture
def model(folders, tmp_path):
    shutil.copytree(folders.model, tmp_path / "model")
    return tmp_path / "model"


ROPE = CONFIG["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", ["llama"]),
        ("num_hidden_layers", 10**6),
        ("num_hidden_layers", 10**400),
        ("hidden_size", 0),
        ("vocab_size", 2**62),
        ("num_attention_heads", 10**6),
        ("head_dim", "4"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
        ("rope_theta", float("nan")),
        ("max_position_embeddings", float("inf")),
        ("rope_scaling", [1]),
        ("rope_scaling", {**ROPE, "factor": 0}),
        ("rope_scaling", {**ROPE, "factor": float("nan")}),
        ("rope_scaling", {**ROPE, "factor": "8"}),
        ("rope_scaling", {**ROPE, "high_freq_factor": 1.0}),
        ("rope_scaling", {**ROPE, "rope_type": ["llama3"]}),
    ],
)
def test_a_config_json_of_no_model_is_one_sentence(model, name, value):
    (model / "config.json").write_text(json.dumps({**CONFIG, name: value}))
    with pytest.raises((CheckpointError, ConfigError)) as e:
        open_pretrained(model)
    assert len(str(e.value)) < 500


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": ["6"], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [6.0], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [1] * 40 + [6], "data_offsets": [0, 24]},
        {"dtype": ["F32"], "shape": [6], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [6], "data_offsets": [0, 24, 24]},
        {"dtype": "F32", "shape": [6]},
        [],
    ],
)
def test_a_tensor_of_no_shape_is_one_sentence(tmp_path, entry):
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(CheckpointError, match="is not a whole safetensors file: the tensor a"):
        SafeTensors(tmp_path)


def test_a_header_with_a_name_twice_is_refused(tmp_path):
    entry = json.dumps({"dtype": "U8", "shape": [1], "data_offsets": [0, 1]})
    header = f'{{"a": {entry}, "a": {entry}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1))
    with pytest.raises(CheckpointError, match="the key 'a' twice"):
        SafeTensors(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_a_link_out_of_a_models_folder_is_refused_by_name(model, tmp_path, name):
    (tmp_path / "secret").write_bytes((model / name).read_bytes() if (model / name).is_file() else b"x")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{name} is a link out of its folder.*; copy the file into"):
        open_pretrained(model)
    (model / name).unlink()
    shutil.copy(tmp_path / "secret", model / name)  # as it says
    assert open_pretrained(model).length == 64


def test_links_of_a_hub_cache_are_followed_within_the_repository(model, tmp_path):
    repository = tmp_path / "models--a--b"
    (repository / "snapshots" / "123").mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in model.iterdir():
        file.rename(repository / "blobs" / f"hash-{file.name}")
        (repository / "snapshots" / "123" / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    (tmp_path / "short").symlink_to(repository / "snapshots" / "123")
    assert open_pretrained(tmp_path / "short").length == 64
    link = repository / "snapshots" / "123" / "config.json"
    link.unlink()
    link.symlink_to("../../../models--c--d/blobs/x")
    with pytest.raises(CheckpointError, match="config.json is a link out of its folder"):
        open_pretrained(repository / "snapshots" / "123")


def test_a_pattern_that_takes_for_ever_to_compare_is_refused(folders, tmp_path):
    shutil.copytree(folders.adapters, tmp_path / "adapters")
    about = json.loads((folders.adapters / "adapter_config.json").read_text())
    about["alpha_pattern"] = {"(.+)+x": 4}
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="could take for ever to match; use the name of a module"):
        open_pretrained(folders.model, adapters=tmp_path / "adapters")


@pytest.mark.parametrize("vocab", [{}, {"a": 2**32 - 1}])
def test_a_tokenizer_without_a_vocabulary_is_one_sentence(folders, tmp_path, vocab):
    from jaxscale.data import HFTokenizer

    about = json.loads((folders.model / "tokenizer.json").read_text())
    about["model"]["vocab"], about["added_tokens"] = vocab, []
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match="its vocabulary is empty|its ids reach 4294967295"):
        HFTokenizer(str(tmp_path)).vocab_size  # noqa: B018


def test_an_end_that_is_half_a_character_is_one_sentence(folders):
    from jaxscale.data import HFTokenizer

    with pytest.raises(DataError, match="has no such token"):
        HFTokenizer(str(folders.model), eos="\ud800").eos_id  # noqa: B018


def test_an_end_of_thousands_of_letters_is_a_short_sentence(folders):
    from jaxscale.data import HFTokenizer

    with pytest.raises(DataError, match="x ... x+'; name one with eos=; known: </s>, <s>, <unk>") as e:
        HFTokenizer(str(folders.model), eos="x" * 5000).eos_id  # noqa: B018
    assert len(str(e.value)) < 600


def test_a_dtype_of_thousands_of_letters_is_a_short_sentence(tmp_path):
    header = json.dumps({"a": {"dtype": "x" * 5000, "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1))
    with pytest.raises(CheckpointError) as e, SafeTensors(tmp_path).reading("a"):
        pass
    assert len(str(e.value)) < 500


def test_arrays_that_a_file_cannot_hold_are_not_made_room_for(tmp_path):
    save_tensors(tmp_path / "model.safetensors", {"a": np.zeros(4, np.float32)})
    data = (tmp_path / "model.safetensors").read_bytes().replace(b"[4]", b"[9]")
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="the offsets of the tensor a do not fit its shape"):
        SafeTensors(tmp_path)
