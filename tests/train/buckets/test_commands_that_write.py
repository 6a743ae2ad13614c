"""Commands write where their URLs say, and print these URLs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxscale as js
from jaxscale import working_copy
from jaxscale.buckets import Bucket
from jaxscale.cli import main
from jaxscale.errors import MISTAKE, DataError
from tests.truth.bucket_runs import forget
from tests.truth.runs import bigram

pytest.importorskip("moto", reason="needs moto[server] and gcp-storage-emulator")


@pytest.mark.long
def test_files_that_commands_write_are_in_the_bucket(copy, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    base = f"s3://runs/{tmp_path.name}"
    for words in (
        ["eval", copy],
        ["eval", copy, "--out", f"{base}/eval.json"],
        ["export", copy, f"{base}/hf"],
        ["export", copy, f"{base}/one.gguf"],
        ["checkpoint", "export", copy, "--out", f"{base}/orbax"],
        ["import", f"{base}/hf", f"{base}/imported"],
    ):
        forget()
        assert main(words) == 0, words
    printed = "".join(capfd.readouterr())
    assert str(working_copy.cache_root()) not in printed
    for name in (
        f"{copy}/eval/perplexity-1.json",
        f"{base}/eval.json",
        f"{base}/one.gguf: ",
        f"{base}/imported: ",
    ):
        assert name in printed
    assert not Path("s3:").exists()
    assert Bucket(copy).exists("eval/perplexity-1.json")
    assert {"eval.json", "one.gguf", "hf/config.json"} < set(Bucket(base).list())

    for key in Bucket(f"{base}/orbax").list():
        (tmp_path / "back" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "back" / key).write_bytes(Bucket(f"{base}/orbax").read(key))
    with ocp.StandardCheckpointer() as reader:
        read = reader.restore((tmp_path / "back").absolute())
    want = js.load(copy).checkpoints.arrays(6).read("params/embed/weight", [((0, 256), (0, 32))])
    np.testing.assert_array_equal(read["params"]["embed"]["weight"], *want.values())


@pytest.mark.long
def test_a_sweep_in_a_bucket_goes_on_on_another_machine_and_repeats_nothing(tmp_path, capfd):
    url, config = f"s3://runs/{tmp_path.name}/sweep", tmp_path / "lrs.gin"
    axes = 'sweep.axes = {"train.lr": [1e-3, 3e-3]}\nsweep.objective = "loss"\n'
    config.write_text(js.config.dumps("train", js.TrainConfig(**bigram(steps=2)).values()) + axes)
    assert main(["sweep", str(config), "--run", url]) == 0
    rows = js.sweep.Result(url).table()
    assert [row["state"] for row in rows] == ["finished", "finished"]
    forget()
    assert main(["sweep", str(config), "--run", url]) == 0
    printed = "".join(capfd.readouterr())
    assert str(working_copy.cache_root()) not in printed and f"{url}/report.html" in printed
    forget()
    assert js.sweep.Result(url).table() == rows
    assert repr(js.sweep.Result(url)) == f"Result({url!r})"


@pytest.mark.long
def test_what_exists_in_a_bucket_is_not_overwritten_and_near_names_are_urls(copy, tmp_path, capfd):
    base = f"s3://runs/{tmp_path.name}"
    Bucket(base).write("one.gguf", b"x")
    Bucket(base).write("orbax/x", b"x")
    for words, message in (
        (["export", copy, f"{base}/one.gguf"], f"{base}/one.gguf already exists; name another file"),
        (["eval", copy, "--out", f"{base}/one.gguf"], f"{base}/one.gguf already exists; name another file"),
        (["checkpoint", "export", copy, "--out", f"{base}/orbax"], f"{base}/orbax already exists; name another folder"),
        (["report", copy[:-1]], f"did you mean '{copy}'"),
    ):
        assert main(words) == MISTAKE
        assert message in capfd.readouterr().err, words


@pytest.mark.long
def test_what_is_written_to_a_disk_only_refuses_urls(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "s3://runs/study"]) == MISTAKE
    assert "s3://runs/study is in a bucket, and this is written to a disk" in capfd.readouterr().err
    with pytest.raises(DataError, match="s3://runs/t.json is in a bucket, and a tokenizer is written to a disk"):
        js.data.train_bpe(["text"] * 9, 300, "s3://runs/t.json")
    assert not Path("s3:").exists()
