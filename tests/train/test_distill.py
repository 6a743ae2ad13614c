"""Distillation: values in float64, other teachers, cached teachers, layouts, what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

import jaxscale as js
from jaxscale.cli import main
from jaxscale.data import Loader, annotated
from jaxscale.errors import CheckpointError, ConfigError, DataError
from jaxscale.infer.annotate import annotate
from jaxscale.models import TransformerConfig
from jaxscale.step import (
    DPO,
    Distill,
    ForwardKL,
    JensenShannon,
    NextToken,
    ReverseKL,
    TrainConfig,
    describe_model,
    settled,
)
from jaxscale.step.objective import terms_of
from jaxscale.step.objectives.distill import IDS, LOGPROBS
from jaxscale.testing import check_objective, random_batch, random_params
from jaxscale.train import FromRun
from tests.truth.errors import raises_saying
from tests.truth.long import short

VOCAB = 32
STUDENT = TransformerConfig(vocab=VOCAB, depth=1, width=16, heads=2)
TEACHER = TransformerConfig(vocab=VOCAB, depth=2, width=32, heads=4)
CORPUS = js.data.synthetic(VOCAB, documents=200, length=12)
ROWS = dict(data=CORPUS, batch_size=8, seq_len=12, eval_batches=1, segments=False)
QUIET = dict(quiet=True)
TOKENS = np.random.default_rng(4).integers(0, VOCAB, (64, 13)).astype(np.int32)
PAIRS = js.data.records(
    [{"tokens": x[:-1], "targets": x[1:], "weights": np.ones(12, np.float32)} for x in TOKENS],
    heldout=0.2, group=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "run"
    return js.fit(model=TEACHER, layout=None, steps=30, lr=1e-2, run=path, **ROWS, **QUIET)


def start(teacher):
    return FromRun(str(teacher.path))


@functools.cache
def batch_of():
    batch = random_batch(VOCAB, rows=4, seq=12)
    batch["weights"] = np.random.default_rng(2).integers(0, 2, (4, 12)).astype(np.float32)
    return {**batch, "rows": np.arange(4, dtype=np.int32)}


def models():
    out = []
    for config, seed in ((STUDENT, 1), (TEACHER, 2)):
        graphdef, infos = describe_model(config)
        out.append(nnx.merge(graphdef, jax.tree.map(jnp.asarray, random_params(infos, seed=seed))))
    return out


def value_of(objective, student, teacher, batch):
    terms = terms_of(objective, student, batch, reference=teacher)
    totals = terms | objective.weights(batch, 1)
    return objective.value(totals), objective.metrics(totals)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("divergence", [ForwardKL(), ReverseKL(), JensenShannon(0.3)], ids=str)
def test_values_are_those_of_the_formulas(divergence, temperature):
    student, teacher = models()
    batch = batch_of()
    s, t = (log_softmax(np.asarray(m(batch["tokens"]), np.float64) / temperature, -1) for m in (student, teacher))
    match divergence:
        case ForwardKL():
            want = (np.exp(t) * (t - s)).sum(-1)
        case ReverseKL():
            want = (np.exp(s) * (s - t)).sum(-1)
        case JensenShannon(beta=beta):
            m = np.log(beta * np.exp(t) + (1 - beta) * np.exp(s))
            want = (beta * np.exp(t) * (t - m) + (1 - beta) * np.exp(s) * (s - m)).sum(-1)
    plain = log_softmax(np.asarray(student(batch["tokens"]), np.float64), -1)
    nats = -np.take_along_axis(plain, batch["targets"][..., None], 2)[..., 0]
    weights = batch["weights"] / batch["weights"].sum()
    objective = Distill(FromRun("x"), divergence, temperature, cross_entropy=0.5)
    value, metrics = value_of(objective, student, teacher, batch)
    np.testing.assert_allclose(metrics["divergence"], (want * weights).sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["cross_entropy"], (nats * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(value, ((want + 0.5 * nats) * weights).sum(), rtol=1e-4)


def test_hidden_states_are_compared_and_a_cached_teacher_is_the_divergence_over_its_tokens_and_a_rest():
    student, teacher = models()[0], models()[0]
    batch = batch_of()
    close = nnx.merge(*nnx.split(student))
    close.embed.weight[...] = close.embed.weight[...] * 1.1
    own, theirs = (np.asarray(m.hidden(batch["tokens"]), np.float64) for m in (close, teacher))
    _, metrics = value_of(Distill(FromRun("x"), hidden=0.1), close, teacher, batch)
    want = (((own - theirs) ** 2).mean(-1) * batch["weights"]).sum() / batch["weights"].sum()
    np.testing.assert_allclose(metrics["hidden_distance"], want, rtol=1e-5)

    student, teacher = models()
    s, t = (log_softmax(np.asarray(m(batch["tokens"]), np.float64), -1) for m in (student, teacher))
    ids = np.argsort(-t, -1)[..., :5]
    top = np.take_along_axis(t, ids, 2)
    p, q = (np.exp(np.take_along_axis(x, ids, 2)) for x in (t, s))
    p, q = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, q))
    want = ((p * np.log(p / q)).sum(-1) * batch["weights"]).sum() / batch["weights"].sum()
    cached = {**batch, IDS: ids.astype(np.int32), LOGPROBS: top.astype(np.float32)}
    np.testing.assert_allclose(value_of(Distill(top=5), student, None, cached)[0], want, rtol=1e-4)
    exact = value_of(Distill(FromRun("x")), student, teacher, batch)[0]
    assert value_of(Distill(top=5), student, None, cached)[0] < exact


@pytest.mark.long
def test_it_keeps_an_objectives_promises(teacher):
    for objective in (Distill(start(teacher), cross_entropy=0.3), Distill(start(teacher), JensenShannon())):
        config = settled(TrainConfig(model=STUDENT, layout=None, objective=objective, **ROWS))
        rows = CORPUS.source(None, seq_len=12, split="train").rows(np.arange(8))
        check_objective(config, rows)


@pytest.mark.long
def test_a_student_learns_the_same_on_devices_resumed_and_with_adapters(teacher, tmp_path):
    config = settled(
        TrainConfig(
            model=STUDENT, layout=None, objective=Distill(start(teacher)), steps=4, lr=1e-2, eval_every=4, **ROWS
        )
    )
    one = js.fit(config, run=tmp_path / "one", **QUIET)
    layout = js.Layout("data=2,fsdp=2,tensor=2")
    js.fit(dataclasses.replace(config, layout=layout), until=2, run=tmp_path / "two", **QUIET)
    elsewhere = dataclasses.replace(config, layout=js.Layout("fsdp=4"))
    two = js.fit(elsewhere, run=tmp_path / "two", resume=True, **QUIET)
    for name in ("loss", "divergence", "grad_norm"):
        np.testing.assert_allclose(
            [row[name] for row in two.metrics()], [row[name] for row in one.metrics()], rtol=1e-4, err_msg=name
        )
    np.testing.assert_allclose(two.metrics()[-1]["eval_loss"], one.metrics()[-1]["eval_loss"], rtol=1e-4)
    manifest = two.checkpoints.manifest(4)
    assert not any("teacher" in name for name in manifest["leaves"]) and manifest["teacher"]
    assert two.info["teacher"]["step"] == 30
    count = sum(x.size for x in jax.tree.leaves(two.state.frozen))
    assert count == sum(x.size for x in jax.tree.leaves(teacher.state.params))
    adapted = js.fit(
        start=FromRun(str(one.path)), objective=Distill(start(teacher)), adapters=js.step.LoRA(rank=2), steps=2,
        layout=layout, run=tmp_path / "adapted", **ROWS, **QUIET,
    )  # fmt: skip
    assert np.isfinite(adapted.metrics()[-1]["loss"]) and set(adapted.state.frozen) == {"own", "teacher"}
    assert jax.tree.structure(adapted.params()) == jax.tree.structure(one.params())


@pytest.mark.long
def test_another_teacher_in_its_place_is_refused(teacher, tmp_path):
    config = TrainConfig(model=STUDENT, layout=None, objective=Distill(start(teacher)), steps=4, **ROWS)
    js.fit(config, until=2, run=tmp_path / "run", **QUIET)
    other = js.fit(model=TEACHER, layout=None, steps=1, run=tmp_path / "other", **ROWS, **QUIET)
    changed = dataclasses.replace(config, objective=Distill(start(other).settled()))
    with raises_saying(CheckpointError, "other frozen parameters", "FromRun.path"):
        js.fit(changed, run=tmp_path / "run", resume=True, **QUIET)


@pytest.mark.long
@pytest.mark.parametrize(
    "objective,array", short(1, [(Distill(top=4), LOGPROBS), (DPO(cached=True), "reference_logprobs")])
)
def test_what_is_annotated_is_what_the_model_says_on_any_layout(objective, array, teacher, tmp_path):
    config = TrainConfig(model=STUDENT, objective=objective, **(ROWS | {"data": PAIRS}))
    annotate(config, teacher, tmp_path / "one", say=lambda _: None)
    annotate(config, teacher, tmp_path / "two", layout=js.Layout("fsdp=2,tensor=2"), rows=6, say=lambda _: None)
    sources = [
        annotated(PAIRS, str(tmp_path / name)).source(None, seq_len=12, split="train") for name in ("one", "two")
    ]
    whole = [source.rows(np.arange(len(source))) for source in sources]
    np.testing.assert_allclose(whole[0][array], whole[1][array], rtol=1e-4, atol=1e-5)
    logits = log_softmax(np.asarray(teacher.model()(whole[0]["tokens"]), np.float64), -1)
    if array == LOGPROBS:
        np.testing.assert_allclose(whole[0][array], -np.sort(-logits, -1)[..., :4], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(logits, whole[0][IDS], 2), whole[0][array], rtol=1e-4, atol=1e-5)
    else:
        want = np.take_along_axis(logits, whole[0]["targets"][..., None], 2)[..., 0]
        np.testing.assert_allclose(whole[0][array], want, rtol=1e-4, atol=1e-5)
    loader = Loader(sources[0], 8, seed=1)
    parts = [loader.batch_at(3, slice(i, i + 2)) for i in range(0, 8, 2)]
    np.testing.assert_array_equal(loader.batch_at(3)[array], np.concatenate([p[array] for p in parts]))


@pytest.mark.long
def test_a_run_reads_what_the_command_wrote(teacher, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.gin").write_text(f"""
train.model = @Transformer()
Transformer.vocab = {VOCAB}
Transformer.depth = 1
Transformer.width = 16
Transformer.heads = 2
train.data = @annotated()
annotated.data = @synthetic()
annotated.folder = "scores"
synthetic.vocab_size = {VOCAB}
synthetic.documents = 200
synthetic.length = 12
train.objective = @Distill()
Distill.top = 8
train.seq_len = 12
train.batch_size = 8
train.eval_batches = 1
train.segments = False
train.steps = 12
""")
    assert main(["train", "c.gin", "--run", "r"]) == 2
    assert "jaxscale annotate" in capsys.readouterr().err
    assert main(["annotate", "c.gin", "--by", str(teacher.path)]) == 0
    assert "annotated.folder = 'scores'" in capsys.readouterr().out
    assert main(["train", "c.gin", "--run", "r"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["divergence"] < rows[0]["divergence"]
    with (tmp_path / "scores" / "train.teacher_logprobs.bin").open("r+b") as file:
        file.write(b"\1\2\3\4")
    assert main(["train", "c.gin", "--run", "s"]) == 2
    assert "train.teacher_logprobs.bin" in capsys.readouterr().err
    assert main(["annotate", "c.gin", "--by", str(teacher.path)]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.long
def test_rows_of_other_settings_are_refused(teacher, tmp_path):
    config = TrainConfig(model=STUDENT, objective=Distill(top=4), **ROWS)
    annotate(config, teacher, tmp_path / "a", say=lambda _: None)
    with raises_saying(DataError, "other rows of 'synthetic'", "jaxscale annotate"):
        annotated(CORPUS, str(tmp_path / "a")).source(None, seq_len=10, split="train")
    with raises_saying(ConfigError, "NextToken reads nothing that another model computes", "Distill.top"):
        annotate(dataclasses.replace(config, objective=NextToken()), teacher, tmp_path / "b")
    with raises_saying(ConfigError, "--out"):
        annotate(config, teacher)
    with raises_saying(ConfigError, "rows = 0"):
        annotate(config, teacher, tmp_path / "b", rows=0)
    mixed = js.data.mixture(((CORPUS, 1.0), (js.data.synthetic(VOCAB, documents=50, length=12, seed=3), 1.0)))
    with raises_saying(DataError, "annotate the corpora"):
        annotated(mixed, str(tmp_path / "a")).source(None, seq_len=12, split="train")


def test_what_does_not_fit_is_refused(teacher, tmp_path):
    good = FromRun(str(teacher.path))
    for make, words in (
        (lambda: Distill(), ("has neither", "Distill.teacher = @FromRun()")),
        (lambda: Distill(good, top=3), ("has both",)),
        (lambda: Distill(top=3, temperature=2.0), ("Distill.temperature needs the teacher itself",)),
        (lambda: Distill(good, temperature=0.0), ("Distill.temperature = 0.0", "above 0")),
        (lambda: Distill(good, ForwardKL), ("Distill.divergence must be", "ForwardKL()")),
        (lambda: Distill("runs/x"), ("Distill.teacher must be FromRun",)),
        (lambda: JensenShannon(1.0), ("JensenShannon.beta = 1.0", "ForwardKL()")),
        (
            lambda: TrainConfig(model=dataclasses.replace(STUDENT, vocab=40), objective=Distill(good)),
            ("has a vocabulary of 32 tokens", "one of 40"),
        ),
        (
            lambda: TrainConfig(model=STUDENT, objective=Distill(good, hidden=1.0)),
            ("hidden states", "32 elements", "16", "set the student's width to 32", "Distill.hidden to 0"),
        ),
    ):  # fmt: skip
        with raises_saying(ConfigError, *words):
            make()
    staged = TrainConfig(
        model=dataclasses.replace(STUDENT, depth=2), layout=js.Layout("pipeline=2"), objective=Distill(good), **ROWS
    )
    with raises_saying(ConfigError, "the last pipeline stage cannot compute Distill"):
        js.step.prepare(settled(staged))


@pytest.mark.long
def test_from_names_the_start_and_leaves_the_teacher(teacher, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = js.fit(model=STUDENT, layout=None, steps=1, run=tmp_path / "base", **ROWS, **QUIET)
    (tmp_path / "c.gin").write_text(f"""
train.data = @synthetic()
synthetic.vocab_size = {VOCAB}
synthetic.documents = 200
synthetic.length = 12
train.objective = @Distill()
Distill.teacher = @FromRun()
FromRun.path = "{teacher.path}"
train.seq_len = 12
train.batch_size = 8
train.eval_batches = 0
train.segments = False
train.steps = 1
""")
    assert main(["train", "c.gin", "--from", str(base.path), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert f"start    step 1 of {base.path}" in output and f"teacher  step 30 of {teacher.path}" in output
    assert "data     synthetic, not opened" in output
    assert main(["train", "c.gin", "--from", str(base.path), "--run", "r"]) == 0
    info = js.load(tmp_path / "r").info
    assert (info["start"]["run"], info["teacher"]["run"]) == (str(base.path), str(teacher.path))


@pytest.mark.long
def test_a_cached_reference_is_compared_with_the_start(teacher, tmp_path, caplog):
    config = TrainConfig(
        model=TEACHER, layout=None, objective=DPO(cached=True), steps=1, **(ROWS | {"data": PAIRS, "eval_batches": 0})
    )
    annotate(config, teacher, tmp_path / "a", say=lambda _: None)
    config = dataclasses.replace(config, data=annotated(PAIRS, str(tmp_path / "a")))
    with raises_saying(ConfigError, "DPO compares with the parameters that a run starts from", "--from RUN"):
        js.fit(config, run=tmp_path / "none", **QUIET)
    js.fit(config, start=start(teacher), run=tmp_path / "same", **QUIET)
    assert "cached reference" not in caplog.text
    other = js.fit(model=TEACHER, layout=None, steps=1, run=tmp_path / "other", **ROWS, **QUIET)
    js.fit(config, start=start(other), run=tmp_path / "run", **QUIET)
    assert f"the cached reference is step 30 of {teacher.path}, but the run starts from step 1 of" in caplog.text


def test_an_array_that_is_missing_is_one_to_compute(tmp_path):
    config = TrainConfig(model=STUDENT, layout=None, objective=Distill(top=4), **ROWS)
    with raises_saying(DataError, "Distill needs an array 'teacher_ids'", "jaxscale annotate CONFIG --by RUN"):
        js.fit(config, run=tmp_path / "run", **QUIET)


def test_a_session_refuses_a_reference_that_it_has_not_read(teacher, tmp_path):
    batch = {"tokens": TOKENS[:4, :-1], "targets": TOKENS[:4, 1:], "weights": np.ones((4, 12), np.float32)}
    config = TrainConfig(model=TEACHER, layout=None, start=start(teacher), steps=1, **ROWS)
    with js.session(config, folder=tmp_path / "run") as s:
        for objective in (DPO(), Distill(start(teacher))):
            with raises_saying(ConfigError, "a frozen model that this session has not read", "train.objective"):
                s.forward_backward(batch, objective)
    pairs = dataclasses.replace(config, objective=DPO(), data=PAIRS, eval_batches=0)
    with js.session(pairs, folder=tmp_path / "two") as s:
        assert abs(float(s.forward_backward(batch)["loss"]) - np.log(2)) < 1e-6
        with raises_saying(ConfigError, "Distill compares with a frozen model"):
            s.forward_backward(batch, Distill(start(teacher)))
