"""The commands `sample` and `eval`, which generate text and evaluate a model."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.infer.evaluate import perplexity

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("def f(x):\n    return x + 1\n" * 3)
    Path("quiz.jsonl").write_text('{"question": "def", "choices": ["f(x):", "é"], "answer": "f(x):"}\n' * 3)


@pytest.fixture
def run(capfd):
    """Run a command in this process: its exit code, stdout and stderr."""

    def call(*argv):
        code = main([str(a) for a in argv])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def folder(finished_run, tmp_path):
    """A copy of a finished run, to write into."""
    return shutil.copytree(finished_run.path, tmp_path / "run")


def test_eval_says_and_writes_a_perplexity_and_never_overwrites_one(run, folder):
    code, out, err = run("eval", folder, "book.txt", "--length", 16, "--stride", 8)
    assert (code, err) == (0, "")
    assert "1 documents, 81 tokens, windows every 8 of 16, step 4" in out
    first = folder / "eval" / "perplexity-1.json"
    result = json.loads(first.read_text())
    assert f"per token {result['perplexity_per_token']:.4f}" in out and f"written to {first}" in out
    assert result["files"] == ["book.txt"] and result["tokens"] == result["bytes"] == 81 and result["words"] == 18
    before = first.read_bytes()
    run("eval", folder, "book.txt", "--mesh", "tensor=2", "--stride", 8)
    assert first.read_bytes() == before
    again = json.loads((folder / "eval" / "perplexity-2.json").read_text())
    assert again["mesh"] == "tensor=2" and again["nats"] == pytest.approx(result["nats"], rel=1e-6)


def test_eval_asks_questions(run, folder):
    code, out, _ = run("eval", folder, "--choices", "quiz.jsonl", "--out", "found.json")
    result = json.loads(Path("found.json").read_text())
    assert code == 0 and result["questions"] == 3 and len(set(result["right"])) == 1
    share, error = float(result["right"][0]), 0.0
    assert f"accuracy: {share:.4f} ± {error:.4f} (3 questions)" in out
    assert re.search(r"accuracy, normalised: [01]\.0000 ± 0\.0000", out)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["nowhere"], ["nowhere is not a run folder"]),
        (["RUN", "gone.txt"], ["gone.txt", "cannot read"]),
        (["RUN", "book.txt", "--stride", "17"], ["stride = 17", "at most 16"]),
        (["RUN", "--choices", "book.txt"], ["book.txt, line 1", "not JSON"]),
        (["RUN", "book.txt", "--choices", "quiz.jsonl"], ["leave out book.txt"]),
        (["RUN", "--choices", "quiz.jsonl", "--stride", "3"], ["--stride"]),
        (["RUN", "book.txt", "--out", "book.txt"], ["book.txt already exists"]),
        (["RUN", "book.txt", "--step", "3"], ["3"]),
        (["RUN", "book.txt", "--mesh", "tensor=16"], ["needs 16 devices"]),
        (["RUN", "--gin.train.seed=3"], ["no settings to change", "--gin.train.seed"]),
    ],
    ids=lambda v: " ".join(v) if v and v[0] in ("RUN", "nowhere") else "",
)
def test_an_evaluation_that_cannot_be_is_one_sentence(run, finished_run, argv, words):
    code, out, err = run("eval", *[{"RUN": str(finished_run.path)}.get(a, a) for a in argv])
    assert code == 2 and re.fullmatch(r"jaxscale: [^\n]+\n", err), (out, err)
    assert not [w for w in words if w not in err], err
    assert not (finished_run.path / "eval").exists()


# --- sample


def test_sample_prints_a_text_as_it_is_generated(run, finished_run):
    options = ["--tokens", 8, "--seed", 1, "--top-p", 0.9, "--min-p", 0.01, "--repetition-penalty", 1.1]
    code, out, _ = run("sample", finished_run.path, "--prompt", "def ", *options)
    settings = dict(max_tokens=8, seed=1, top_p=0.9, min_p=0.01, repetition_penalty=1.1, temperature=0.8)
    stored = js.load(finished_run.path)
    assert (code, out) == (0, f"def {stored.generate('def ', **settings).text}\n")
    stop = out[6:8]
    _, cut, _ = run("sample", finished_run.path, "--prompt", "def ", *options, "--stop", stop)
    assert cut == f"def {stored.generate('def ', stop=stop, **settings).text}\n" and len(cut) < len(out)


def test_several_texts_come_in_their_order(run, finished_run):
    Path("prompts.txt").write_text("def \n\nreturn x\n")
    _, out, _ = run("sample", finished_run.path, "--prompts", "prompts.txt", "-n", 2, "--tokens", 6)
    stored = js.load(finished_run.path)
    texts = [
        prompt + stored.generate(prompt, max_tokens=6, temperature=0.8, seed=seed).text
        for prompt in ("def ", "return x")
        for seed in (0, 1)
    ]
    assert out == "\n\n".join(texts) + "\n"


def test_sample_writes_json(run, finished_run):
    Path("prompts.jsonl").write_text('{"prompt": "def \\nf"}\n{"prompt": "é"}\n')
    _, out, _ = run("sample", finished_run.path, "--prompts", "prompts.jsonl", "--json", "--tokens", 5, "--logprobs", 2)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [r["prompt"] for r in rows] == ["def \nf", "é"]
    for row in rows:
        result = js.load(finished_run.path).generate(row["prompt"], max_tokens=5, temperature=0.8, logprobs=2)
        assert (row["text"], tuple(row["ids"]), row["tokens"]) == (result.text, result.ids, len(result.ids))
        assert row["top"][0][0] == pytest.approx(result.top[0][0], abs=1e-5)  # in a batch and alone


@pytest.mark.long
def test_sample_takes_a_draft_and_a_mesh(run, finished_run):
    argv = ["sample", finished_run.path, "--prompt", "def ", "--tokens", 6, "--temperature", 0]
    _, plain, _ = run(*argv)
    code, out, err = run(*argv, "--draft", finished_run.path)
    assert (code, out) == (0, plain) and "100% of the drafted tokens were accepted" in err
    assert run(*argv, "--mesh", "tensor=2")[:2] == (0, plain)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--top-p", "0"], ["top_p = 0", "above 0"]),
        (["--stop", ""], ["stop", "not empty"]),
        (["-n", "0"], ["-n 0", "at least 1"]),
        (["--rows", "0"], ["--rows 0"]),
        (["--logprobs", "3"], ["--json"]),
        (["--prompt", "a", "--prompts", "book.txt"], ["leave out"]),
        (["--prompts", "gone.txt"], ["gone.txt", "one prompt per line"]),
        (["--prompts", "empty.txt"], ["empty.txt has no prompt"]),
        (["--prompts", "quiz.jsonl"], ["quiz.jsonl, line 1", '"prompt"']),
        (["--draft", "nowhere"], ["nowhere is not a run folder"]),
        (["--draft", "mpt"], ["--draft mpt", "did you mean 'mtp'"]),
        (["--draft", "mtp"], ["draft = 'mtp'", "Transformer.multi_token = 1"]),
        (["--draft", "RUN", "--draft-tokens", "0"], ["draft_tokens = 0"]),
        (["--mesh", "tensor=16"], ["needs 16 devices"]),
        (["--mesh", "tensor=4"], ["shards 2 over 4 devices"]),
        (["--step", "77"], ["77"]),
    ],
    ids=lambda v: " ".join(v) if v and v[0].startswith("-") else "",
)
def test_a_sample_that_cannot_be_is_one_sentence(run, finished_run, argv, words):
    Path("empty.txt").write_text("\n")
    argv = [{"RUN": str(finished_run.path)}.get(a, a) for a in argv]
    code, out, err = run("sample", finished_run.path, *argv)
    assert code == 2 and re.fullmatch(r"jaxscale: [^\n]+\n", err), (out, err)
    assert not [w for w in words if w not in err], err


# --- forms of weights

ROUNDED = """
import dataclasses
import jax.numpy as jnp
from jaxscale.config import register
from jaxscale.nn import WeightFormat

@register
@dataclasses.dataclass(frozen=True)
class Decimals(WeightFormat):
    digits: int = 3

    def encode(self, kernel, contracted):
        return jnp.round(kernel, self.digits)
"""


def test_commands_keep_weights_in_the_form_of_a_module_of_ones_own(run, folder, finished_run, monkeypatch):
    code, _, err = run("sample", folder, "--weights", "Decimals")
    assert code == 2 and "no registered weight format has this name" in err
    Path("own_weights.py").write_text(ROUNDED)
    chosen = ["--import", "own_weights", "--weights", "Decimals", "--gin.Decimals.digits=1"]
    argv = ["--prompt", "def ", "--tokens", 8, "--temperature", 0]
    code, out, err = run("sample", folder, *argv, *chosen)
    rounded = sys.modules["own_weights"].Decimals(digits=1)
    text = js.load(folder).generate("def ", weights=rounded, temperature=0, max_tokens=8).text
    assert (code, out) == (0, f"def {text}\n"), err
    code, _, err = run("eval", folder, "book.txt", "--out", "rounded.json", *chosen)
    assert code == 0, err
    run("eval", folder, "book.txt", "--out", "plain.json")
    result, plain = (json.loads(Path(f).read_text()) for f in ("rounded.json", "plain.json"))
    assert result["weights"] == "Decimals(digits=1)" and plain["weights"] is None
    assert result["nats"] == perplexity(js.load(folder), ["book.txt"], weights=rounded).nats != plain["nats"]
    assert result["unquantised"]["nats"] == plain["nats"]
    assert result["nats_per_token_added"] == (result["nats"] - plain["nats"]) / plain["tokens"]
    for wrong, words in (
        (
            ["--weights", "Decimls"],
            "--weights Decimls: no registered weight format has this name; did you mean 'Decimals'?",
        ),
        (["--weights", "Decimals", "--gin.Decimals.digit=1"], "no parameter 'digit'; did you mean 'digits'?"),
        (["--weights", "Decimals", "--gin.LoRA.rank=1"], "--gin.LoRA.rank is not part of --weights Decimals"),
    ):
        code, out, err = run("sample", folder, *wrong)
        assert code == 2 and re.fullmatch(r"jaxscale: [^\n]+\n", err) and words in err, err
    used = []
    monkeypatch.setattr("jaxscale.infer.serve.engine_of", lambda *_, weights, **__: used.append(weights) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("serve", folder, "--port", "0", *chosen)
    assert used == [rounded]


@pytest.mark.long
def test_commands_take_the_formats_of_few_bits_by_name(run, folder):
    code, out, err = run("eval", folder, "book.txt", "--weights", "mxfp8", "--out", "mxfp8.json")
    assert code == 0 and "mxfp8 adds" in out and "with --weights mxfp8, and" in err, (out, err)
    result = json.loads(Path("mxfp8.json").read_text())
    assert 0 < abs(result["nats_per_token_added"]) < 0.05
    argv = ["--prompt", "def ", "--tokens", 8, "--temperature", 0]
    code, out, err = run("sample", folder, *argv, "--weights", "Stored", "--gin.Stored.numbers='int6'")
    text = js.load(folder).generate("def ", weights=js.nn.Stored("int6"), temperature=0, max_tokens=8).text
    assert (code, out) == (0, f"def {text}\n"), err
    code, out, err = run("sample", folder, *argv, "--weights", "int8", "--gin.int8.group=16")
    text = js.load(folder).generate("def ", weights=js.nn.Stored("int8", group=16), temperature=0, max_tokens=8).text
    assert (code, out) == (0, f"def {text}\n"), err
    code, _, err = run("sample", folder, *argv, "--weights", "mxfp44")
    assert code == 2 and "did you mean 'mxfp4'" in err, err
