"""Import of Hugging Face folders; errors come before anything is written."""

from __future__ import annotations

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest

import jaxscale as js
from jaxscale.convert import pretrained
from jaxscale.convert.pretrained import import_checkpoint
from jaxscale.errors import CheckpointError, RunError
from jaxscale.interop import SafeTensors, open_pretrained
from jaxscale.interop.safetensors import write_header
from jaxscale.layout import Layout
from tests.truth.hf_folder import CONFIG, tensors, write_folder

bf16 = ml_dtypes.bfloat16


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "theirs")


def _change(folder, change):
    made = tensors()
    change(made)
    return write_folder(folder, made)


def test_a_run_folder_of_its_values(folder, tmp_path):
    import_checkpoint(folder, tmp_path / "run")
    run = js.load(str(tmp_path / "run"))
    params, theirs = run.params(), tensors()
    np.testing.assert_array_equal(params["embed"]["weight"], theirs["model.embed_tokens.weight"])
    q = theirs["model.layers.1.self_attn.q_proj.weight"].reshape(4, 8, 32)
    np.testing.assert_array_equal(params["runs"][0]["blocks"][0]["attn"]["q"]["kernel"][1], q.transpose(2, 0, 1))
    assert json.loads((run.path / "hf" / "config.json").read_text()) == CONFIG
    assert run.end_ids == (2,)
    assert run.info["status"] == "imported"


def test_a_region_is_that_part_of_the_whole(folder):
    arrays = open_pretrained(folder).arrays
    for name, leaf in arrays.leaves.items():
        whole = tuple((0, n) for n in leaf.shape)
        part = tuple((n // 2, n) for n in leaf.shape)
        values = arrays.read(name, [whole, part])
        np.testing.assert_array_equal(values[part], values[whole][tuple(slice(*s) for s in part)])


def test_bf16_stays_bf16_bitwise(tmp_path):
    theirs = {k: v.astype(bf16) for k, v in tensors().items()}
    run = import_checkpoint(write_folder(tmp_path / "theirs", theirs), tmp_path / "run")
    assert run.config.model.param_dtype == "bfloat16"
    down = np.asarray(run.params()["runs"][0]["blocks"][0]["mlp"]["down"]["kernel"][2])
    np.testing.assert_array_equal(
        down.view(np.uint16), theirs["model.layers.2.mlp.down_proj.weight"].T.copy().view(np.uint16)
    )


def test_shards_are_read_from_where_the_layout_cuts(folder, tmp_path):
    run = import_checkpoint(folder, tmp_path / "run", layout="tensor=4")
    whole = import_checkpoint(folder, tmp_path / "whole")
    gate = run.path / "checkpoints/0/tensors/params/runs/0/blocks/0/mlp/gate/kernel"
    assert len(list(gate.glob("c.*"))) == 4
    same = pretrained.read_pretrained(open_pretrained(folder), Layout("tensor=4"))
    for a, b, c in zip(*map(_leaves, (run.params(), whole.params(), same)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


@pytest.mark.parametrize("dtype", [np.float32, bf16])
def test_a_tied_model_with_another_head_in_its_file_is_not_tied(tmp_path, dtype):
    """As in transformers; a head with the embedding's values in any dtype counts as tied."""
    made, messages = tensors(), []
    embed = made["model.embed_tokens.weight"].astype(dtype).astype(np.float32)
    made["model.embed_tokens.weight"] = embed
    for head in (embed, embed + 1):
        made["lm_head.weight"] = head.astype(dtype)
        folder = write_folder(tmp_path / "theirs", made)
        (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
        opened = open_pretrained(folder, dtype="float32", say=messages.append)
        assert opened.config.tied == (head is embed)
    assert len(messages) == 1 and "lm_head.weight" in messages[0] and "has other values" in messages[0]
    read = pretrained.read_pretrained(opened, None)
    np.testing.assert_array_equal(read["head"]["weight"], made["lm_head.weight"].astype(np.float32))


def test_files_of_an_index_are_one_checkpoint(folder, tmp_path):
    from safetensors.numpy import save_file

    made = tensors()
    names = sorted(made)
    (folder / "model.safetensors").unlink()
    where = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(where.values()):
        save_file({n: made[n] for n in names if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert set(SafeTensors(folder)) == set(made)
    import_checkpoint(folder, tmp_path / "run")


def _gpt2(folder):
    """A folder of random numbers."""
    from safetensors.numpy import save_file

    e, random = 16, np.random.default_rng(0)
    shapes = {"wte.weight": (24, e), "wpe.weight": (8, e), "ln_f.weight": (e,), "ln_f.bias": (e,)}
    for name, out in (("ln_1", e), ("ln_2", e)):
        shapes |= {f"h.0.{name}.weight": (out,), f"h.0.{name}.bias": (out,)}
    for name, (n, out) in {
        "attn.c_attn": (e, 3 * e),
        "attn.c_proj": (e, e),
        "mlp.c_fc": (e, 4 * e),
        "mlp.c_proj": (4 * e, e),
    }.items():
        shapes |= {f"h.0.{name}.weight": (n, out), f"h.0.{name}.bias": (out,)}
    folder.mkdir()
    made = {f"transformer.{k}": random.standard_normal(s, np.float32) for k, s in shapes.items()}
    save_file(made, folder / "model.safetensors")
    sizes = {"n_embd": e, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 24}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    return folder


def test_names_of_a_bare_gpt2_lack_a_prefix_and_its_masks_are_ignored(tmp_path):
    """The names of the oldest checkpoints."""
    from safetensors.numpy import load_file, save_file

    from jaxscale.convert.pretrained import read_pretrained

    folder = _gpt2(tmp_path / "theirs")
    whole = load_file(folder / "model.safetensors")
    bare = {k.removeprefix("transformer."): v for k, v in whole.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.uint8)
    params = read_pretrained(open_pretrained(folder), None)
    save_file(bare, folder / "model.safetensors")
    for a, b in zip(_leaves(params), _leaves(read_pretrained(open_pretrained(folder), None)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_we_write_their_package_reads(tmp_path):
    from safetensors.numpy import load_file

    made = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3).astype(bf16)}
    with (tmp_path / "model.safetensors").open("wb") as f:
        write_header(f, {k: (v.dtype, v.shape) for k, v in made.items()})
        for v in made.values():
            f.write(v.tobytes())
    read = load_file(tmp_path / "model.safetensors")
    for name, value in made.items():
        np.testing.assert_array_equal(read[name], value)


def test_every_wrong_tensor_is_in_the_list(folder, tmp_path):
    def change(made):
        made["model.norm.scale"] = made.pop("model.norm.weight")
        made["model.layers.0.mlp.up_proj.weight"] = np.zeros((48, 31), np.float32)

    _change(folder, change)
    with pytest.raises(CheckpointError) as e:
        import_checkpoint(folder, tmp_path / "run")
    assert "model.norm.weight is missing" in str(e.value)
    assert "model.norm.scale is not in the model" in str(e.value)
    assert "model.layers.0.mlp.up_proj.weight is [48, 31], and its config.json says [48, 32]" in str(e.value)
    assert not (tmp_path / "run").exists()


def test_whole_numbers_are_no_weights(folder):
    _change(folder, lambda made: made.update({"model.norm.weight": np.ones(32, np.int8)}))
    for dtype in (None, "bfloat16"):
        with pytest.raises(CheckpointError, match="model.norm.weight has the unsupported dtype I8"):
            open_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "lama", "did you mean 'llama'"),
        ("hidden_act", "silly", "did you mean 'silu'"),
        ("rope_scaling", {"rope_type": "lama3", "factor": 2.0}, "did you mean 'llama3'"),
        ("quantization_config", {"quant_method": "awq"}, "is quantised (awq)"),
        ("num_hidden_layers", 0, "num_hidden_layers = 0"),
    ],
)
def test_a_field_that_is_not_known_is_refused(folder, tmp_path, field, value, message):
    (folder / "config.json").write_text(json.dumps(CONFIG | {field: value}))
    with pytest.raises(CheckpointError) as e:
        import_checkpoint(folder, tmp_path / "run")
    assert message in str(e.value)


def test_pickled_weights_are_refused(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights only"):
        import_checkpoint(folder, tmp_path / "run")


def test_a_file_that_was_cut_short_is_refused(folder, tmp_path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cut short"):
        import_checkpoint(folder, tmp_path / "run")
    endless = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}'
    for wrong in (struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", len(endless)) + endless):
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            import_checkpoint(folder, tmp_path / "run")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(CheckpointError, match="is not an index of tensors"):
        import_checkpoint(folder, tmp_path / "run")


def test_a_folder_that_is_there_is_left_as_it_is(folder, tmp_path):
    import_checkpoint(folder, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with pytest.raises(RunError, match="already exists"):
        import_checkpoint(folder, tmp_path / "run")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_an_interrupted_import_goes_on(folder, tmp_path, monkeypatch):
    from jaxscale.train.checkpoints import places, write

    real, written = places.write_file, []

    def stop_at_ten(path, data):
        if len(written) == 10:
            raise OSError(28, "No space left on device")
        written.append(path)
        real(path, data)

    monkeypatch.setattr(places, "write_file", stop_at_ten)
    monkeypatch.setattr(write, "THREADS", 1)
    with pytest.raises(CheckpointError, match="No space left"):
        import_checkpoint(folder, tmp_path / "run")
    assert js.load(str(tmp_path / "run")).checkpoints.steps() == []
    again = []
    monkeypatch.setattr(places, "write_file", lambda path, data: (again.append(path), real(path, data)))
    messages = []
    import_checkpoint(folder, tmp_path / "run", say=messages.append)
    assert "continuing it" in messages[0]
    done = {p.relative_to(p.parents[3]) for p in written}
    assert done.isdisjoint(p.relative_to(p.parents[3]) for p in again if p.name.startswith("c."))
    import_checkpoint(folder, tmp_path / "whole")
    for a, b in zip(*(_leaves(js.load(str(tmp_path / n)).params()) for n in ("run", "whole")), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_unfinished_import_of_other_files_is_left_as_it_is(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(pretrained, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(folder, tmp_path / "run")
    with pytest.raises(RunError, match="began with other files or settings"):
        import_checkpoint(folder, tmp_path / "run", dtype="bfloat16")


def test_an_unfinished_import_of_other_values_is_left_as_it_is(folder, tmp_path, monkeypatch):
    """Even if name, size and mtime of the file are the same, as in copies of a snapshot."""
    file = folder / "model.safetensors"
    before = file.stat()
    with monkeypatch.context() as m:
        m.setattr(pretrained, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            import_checkpoint(folder, tmp_path / "run")
    write_folder(folder, {k: v + 1 for k, v in tensors().items()})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    with pytest.raises(RunError, match="began with other files or settings"):
        import_checkpoint(folder, tmp_path / "run")


def test_a_name_on_the_hub_is_downloaded_without_what_is_not_read(folder, tmp_path, monkeypatch):
    import huggingface_hub

    request = {}

    def download(name, *, revision, allow_patterns):
        request.update(name=name, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    run = import_checkpoint("someone/some-llama", tmp_path / "run", revision="v1")
    assert (request["name"], request["revision"]) == ("someone/some-llama", "v1")
    assert "*.safetensors" in request["patterns"]
    assert not any(p.endswith((".bin", ".pt", ".py")) for p in request["patterns"])
    assert run.info["family"] == "llama"


def test_a_name_that_cannot_be_had_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="could not be downloaded from the Hugging Face Hub"):
        import_checkpoint("nobody/nothing-0b", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"it is not a name on the Hub, such as Qwen/Qwen3-0\.6B$"):
        import_checkpoint(tmp_path / "nowhere", tmp_path / "run")
    (tmp_path / "models" / "nemotron").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="; did you mean models/nemotron\\?$"):
        import_checkpoint("models/nemotrn", tmp_path / "run")
