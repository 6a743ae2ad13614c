"""Classification and regression of texts: losses in float64 NumPy, labels in corpora, training, wrong labels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

import jaxscale as js
from jaxscale.data import ByteTokenizer, labelled_files
from jaxscale.errors import ConfigError, DataError
from jaxscale.models import TransformerConfig, WithHead
from jaxscale.step import (
    Classification,
    HLGauss,
    SquaredError,
    TrainConfig,
    blueprint_of,
    describe_model,
    make_loss_and_grads,
)
from jaxscale.step.objective import terms_of
from jaxscale.testing import check_objective, random_batch, random_params
from tests.truth.errors import raises_saying

MODEL = WithHead(TransformerConfig(vocab=32, depth=1, width=16, heads=2), outputs=3)
ROWS, SEQ = 6, 8
TOKENS = ByteTokenizer()


@functools.cache
def batch_of():
    """Texts of 1 to 7 tokens, and one row that only pads the batch."""
    batch = random_batch(32, rows=ROWS, seq=SEQ)
    ends = np.array([1, 7, 3, 4, 6, 0])
    batch["weights"] = (np.arange(SEQ) < ends[:, None]).astype(np.float32)
    batch["label"] = np.array([0, 2, 1, 2, 0, 0], np.float32)
    batch["rows"] = np.arange(ROWS, dtype=np.int32)
    del batch["targets"]
    return batch


def run_on(model, objective):
    graphdef, infos = describe_model(model)
    params = jax.tree.map(jnp.asarray, random_params(infos, seed=1))

    @jax.jit
    def outputs(params):
        module = nnx.merge(graphdef, params)
        hidden = module.backbone.hidden(batch_of()["tokens"])
        last = batch_of()["weights"].sum(1).astype(int)[:-1] - 1
        return module.scores(hidden[np.arange(ROWS - 1), last])

    @functools.partial(jax.jit)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value(params):
        terms = terms_of(objective, nnx.merge(graphdef, params), batch_of(), reference=None)
        totals = terms | objective.weights(batch_of(), 1)
        return objective.value(totals), objective.metrics(totals)

    (loss, metrics), grads = value(params)
    return np.asarray(outputs(params), np.float64), loss, metrics, grads


def test_the_loss_is_the_cross_entropy_of_the_class():
    logits, loss, metrics, grads = run_on(MODEL, Classification())
    label = batch_of()["label"][:-1].astype(int)
    want = -log_softmax(logits, axis=1)[np.arange(ROWS - 1), label].mean()
    np.testing.assert_allclose([loss, metrics["loss"]], want, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(logits.argmax(1) == label), rtol=1e-6)
    assert all(np.any(x) for x in jax.tree.leaves(grads["score"]))


@pytest.mark.parametrize("loss", [SquaredError(), HLGauss(-1.0, 3.0, bins=9)], ids=str)
def test_values_have_the_loss_of_the_setting(loss):
    model = dataclasses.replace(MODEL, outputs=loss.outputs)
    outputs, value, metrics, _ = run_on(model, Classification(loss))
    label = batch_of()["label"][:-1]
    np.testing.assert_allclose(value, np.mean(np.asarray(loss.loss(outputs, label), np.float64)), rtol=1e-4)
    error = np.abs(np.asarray(loss.mean(outputs), np.float64) - label).mean()
    np.testing.assert_allclose(metrics["error"], error, rtol=1e-4)
    assert "accuracy" not in metrics


@pytest.mark.long
def test_parts_add_up_and_layouts_agree():
    config = TrainConfig(
        model=MODEL, layout=None, seq_len=SEQ, objective=Classification(), batch_size=ROWS, segments=False
    )
    check_objective(config, batch_of())
    results = []
    for layout in (None, js.Layout("fsdp=2,context=2,tensor=2")):
        blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
        step = jax.jit(make_loss_and_grads(blueprint, objective=Classification(), accumulate=1))
        params = jax.tree.map(jnp.asarray, random_params(describe_model(MODEL)[1], seed=1))
        with layout or contextlib.nullcontext():
            results.append(step(params, batch_of(), jax.random.key(0), {}))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def write(tmp_path, lines):
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "lines.jsonl")


def source(tmp_path, lines, split="train", seq_len=16, **settings):
    corpus = labelled_files(write(tmp_path, lines), **{"heldout": 0.0, **settings})
    return corpus.source(TOKENS, seq_len=seq_len, split=split, cache=tmp_path / "cache")


def test_rows_have_their_text_and_label(tmp_path):
    labels = [0, 7, True, -1.5, 3.25e8, 1e-30, 0.1]
    lines = [{"text": f"text {i}" * (i % 2 + 1), "label": x} for i, x in enumerate(labels)]
    rows = source(tmp_path, lines)
    for opened in (rows, pickle.loads(pickle.dumps(rows))):
        batch = opened.rows(np.arange(7))
        np.testing.assert_array_equal(batch["label"], np.array(labels, np.float32))
        for i, line in enumerate(lines):
            n = int(batch["weights"][i].sum())
            assert TOKENS.decode(batch["tokens"][i, 1:n]) == line["text"] and batch["targets"][i, n - 1] == 0
            assert not batch["weights"][i, n:].any() and batch["tokens"][i, 0] == TOKENS.eos_id
    with raises_saying(DataError, "3 of 7 documents", "longest has 13 tokens", "labelled_files.too_long"):
        source(tmp_path, lines, seq_len=12)
    dropped = source(tmp_path, lines, seq_len=12, too_long="drop").rows(np.arange(4))
    np.testing.assert_array_equal(dropped["label"], np.array(labels[::2], np.float32))
    both = [source(tmp_path, lines, split, heldout=0.4) for split in ("train", "heldout")]
    seen = np.concatenate([x.rows(np.arange(len(x)))["label"] for x in both])
    np.testing.assert_array_equal(np.sort(seen), np.sort(np.array(labels, np.float32)))


@pytest.mark.parametrize(
    "line,words",
    [
        ({"text": "a"}, ("line 1", "no 'label'", "text, label")),
        ({"text": "a", "label": "good"}, ("'label' is 'good'", "give a number")),
        ({"text": "a", "label": float("nan")}, ("'label' is nan",)),
        ({"text": "a", "label": 1e300}, ("give a number",)),
        ({"text": 3, "label": 1}, ("'text' is 3", "give a text")),
        ({"text": "", "label": 1}, ("'text' is empty",)),
    ],
)
def test_wrong_lines_are_refused(tmp_path, line, words):
    with raises_saying(DataError, *words):
        source(tmp_path, [line])


def texts(n=40):
    """Class 1 has a 'b', class 2 a 'c'."""
    random = np.random.default_rng(0)
    for i in range(n):
        word = random.choice(list("xyz"), 6)
        word[random.integers(6)] = "abc"[i % 3]
        yield {"text": "".join(word), "label": i % 3}


def settings(tmp_path, **more):
    backbone = TransformerConfig(vocab=256, depth=1, width=32, heads=2)
    model = WithHead(backbone, outputs=more.pop("outputs", 3))
    data = labelled_files(write(tmp_path, texts()), heldout=0.2)
    defaults = dict(objective=Classification(), seq_len=8, batch_size=16, steps=30, lr=1e-2, eval_batches=1)
    return {"model": model, "data": data, "layout": None, "quiet": True, **defaults, **more}


@pytest.mark.long
def test_a_classifier_learns(tmp_path):
    run = js.fit(run=tmp_path / "run", **settings(tmp_path))
    rows = run.metrics()
    assert rows[0]["loss"] == pytest.approx(np.log(3), rel=1e-6)  # the head is zeros
    assert rows[-1]["eval_accuracy"] == 1 and rows[-1]["loss"] < 0.1
    lines = list(texts())
    got = run.classify([line["text"] for line in lines])
    assert got.argmax(1).tolist() == [line["label"] for line in lines]
    ids = np.array([[TOKENS.eos_id, *TOKENS.encode(line["text"])] for line in lines])
    module = run.model()
    want = jax.jit(lambda ids: jax.nn.softmax(module.scores(module.backbone.hidden(ids)[:, -1])))(ids)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    with raises_saying(ConfigError, "texts = 'abc': must be a list of texts"):
        run.classify("abc")
    with raises_saying(ConfigError, "texts[1] = '': must be a text"):
        run.classify(["abc", ""])


def test_labels_out_of_range_are_refused_before_training(tmp_path):
    with raises_saying(DataError, "has the label 2, but WithHead.outputs = 2 gives classes 0 to 1", "outputs = 3"):
        js.fit(run=tmp_path / "run", **settings(tmp_path, outputs=2))
    more = settings(tmp_path)
    write(tmp_path, [{"text": "a", "label": 0.5}] * 4)
    with raises_saying(DataError, "label 0.5, which is no class", "Classification.value_loss"):
        js.fit(run=tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: Classification(SquaredError), ("Classification.value_loss must be a loss such as SquaredError()",)),
        (lambda: TrainConfig(model=WithHead(MODEL.backbone), objective=Classification()), ("at least 2", "not 1")),
        (
            lambda: TrainConfig(model=MODEL, objective=Classification(HLGauss(0.0, 1.0))),
            ("WithHead.outputs = 51", "HLGauss", "not 3"),
        ),
        (
            lambda: TrainConfig(model=MODEL.backbone, objective=Classification()),
            ("Transformer has none", "@WithHead()"),
        ),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with raises_saying(ConfigError, *words):
        make()
