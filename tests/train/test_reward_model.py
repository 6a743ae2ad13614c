"""Reward models: the pairwise loss and its gradients in float64 NumPy, layouts, starting from a run of the backbone."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.data import preference_files
from jaxscale.errors import CheckpointError, ConfigError, DataError
from jaxscale.models import TransformerConfig, WithHead
from jaxscale.step import DPO, LoRA, NextToken, RewardModel, TrainConfig, Unfreeze, describe_model
from jaxscale.step.objective import terms_of
from jaxscale.step.prepare import check_ids
from jaxscale.testing import assert_layouts_agree, check_objective, random_batch, random_params
from jaxscale.train import FromRun
from tests.truth.errors import raises_saying
from tests.truth.runs import write_text

BACKBONE = TransformerConfig(vocab=32, depth=1, width=16, heads=2)
MODEL = WithHead(BACKBONE)
ROWS, SEQ = 8, 12


@functools.cache
def batch_of():
    """Prompts of 2 tokens, answers of 3 to 9, and one pair that only pads the batch."""
    ends = np.random.default_rng(5).integers(5, SEQ, ROWS)
    at = np.arange(SEQ)
    batch = random_batch(32, rows=ROWS, seq=SEQ)
    batch["weights"] = ((at >= 2) & (at < ends[:, None])).astype(np.float32)
    batch["weights"][-2:] = 0
    batch["rows"] = np.arange(ROWS, dtype=np.int32)
    del batch["targets"]
    return batch


@functools.cache
def model():
    graphdef, infos = describe_model(MODEL)
    return graphdef, jax.tree.map(jnp.asarray, random_params(infos, seed=1))


def states():
    """The backbone's float64 hidden states at each row's last learned token."""
    graphdef, params = model()
    batch = batch_of()
    hidden = nnx.merge(graphdef, params).backbone.hidden(batch["tokens"])
    last = [int(np.flatnonzero(w)[-1]) for w in batch["weights"][:-2]]
    return np.asarray(hidden, np.float64)[np.arange(ROWS - 2), last]


def by_formula(states, kernel, margin, center):
    chosen, rejected = (states @ kernel)[::2, 0], (states @ kernel)[1::2, 0]
    return np.mean(np.logaddexp(0, -(chosen - rejected - margin)) + center * (chosen + rejected) ** 2)


def value_of(objective, params):
    graphdef, _ = model()
    terms = terms_of(objective, nnx.merge(graphdef, params), batch_of(), reference=None)
    totals = terms | objective.weights(batch_of(), 1)
    return objective.value(totals), objective.metrics(totals)


@pytest.mark.parametrize("objective", [RewardModel(), RewardModel(margin=0.5, center=0.1)], ids=str)
def test_loss_and_gradient_of_the_head_are_the_formulas(objective):
    _, params = model()
    (value, metrics), grads = jax.jit(jax.value_and_grad(lambda p: value_of(objective, p), has_aux=True))(params)
    kernel, h = np.asarray(params["score"]["kernel"], np.float64), states()
    formula = functools.partial(by_formula, margin=objective.margin, center=objective.center)
    np.testing.assert_allclose([value, metrics["loss"]], formula(h, kernel), rtol=2e-5)
    rewards = (h @ kernel)[:, 0].reshape(-1, 2)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(rewards[:, 0] > rewards[:, 1]), rtol=1e-6)
    np.testing.assert_allclose(metrics["chosen_reward"], rewards[:, 0].mean(), rtol=2e-5)
    slopes = np.zeros_like(kernel)
    for i in range(len(kernel)):
        step = np.zeros_like(kernel)
        step[i] = 1e-6
        slopes[i] = (formula(h, kernel + step) - formula(h, kernel - step)) / 2e-6
    np.testing.assert_allclose(grads["score"]["kernel"], slopes, rtol=1e-4, atol=1e-6)
    assert any(np.any(x) for x in jax.tree.leaves(grads["backbone"]["runs"]))


def test_parts_add_up_and_padding_has_no_gradient():
    config = TrainConfig(
        model=MODEL, layout=None, seq_len=SEQ, objective=RewardModel(center=0.1), batch_size=ROWS, segments=False
    )
    check_objective(config, batch_of())
    _, params = model()
    empty = {**batch_of(), "weights": np.zeros((ROWS, SEQ), np.float32)}

    def value(p):
        objective, module = config.objective, nnx.merge(model()[0], p)
        return objective.value(terms_of(objective, module, empty, reference=None) | objective.weights(empty, 1))

    loss, grads = jax.jit(jax.value_and_grad(value))(params)
    assert loss == 0 and not any(np.any(x) for x in jax.tree.leaves(grads))


def test_training_gives_the_same_numbers_on_a_layout_that_reorders_tokens():
    ring = WithHead(dataclasses.replace(BACKBONE, attention=js.nn.RingAttention()))
    batch = {k: x for k, x in batch_of().items() if k != "rows"}
    layout = js.Layout("fsdp=2,context=2,tensor=2")
    with layout:
        assert ring.backbone.attention.order(SEQ) is not None
    assert_layouts_agree(ring, [layout], batch=batch, objective=RewardModel(0.2, 0.1), accumulate=2)


def pairs(tmp_path, n=24):
    """Answers with a 'b' are worse."""
    random = np.random.default_rng(0)
    with (tmp_path / "pairs.jsonl").open("w") as f:
        for _ in range(n):
            good = "".join(random.choice(list("acd"), 5))
            f.write(json.dumps({"prompt": "x", "chosen": good, "rejected": good[:2] + "b" + good[3:]}) + "\n")
    return preference_files(str(tmp_path / "pairs.jsonl"), heldout=0.2)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A run of a language model alone."""
    folder = tmp_path_factory.mktemp("backbone")
    model = dataclasses.replace(BACKBONE, vocab=256)
    more = dict(data=js.data.text_files(f"{write_text(folder / 'text')}/*.txt"), eval_batches=0)
    return js.fit(run=folder / "run", model=model, seq_len=16, batch_size=4, steps=1, layout=None, quiet=True, **more)


SETTINGS = dict(objective=RewardModel(), seq_len=16, batch_size=8, layout=None, quiet=True)


@pytest.mark.long
def test_a_reward_model_starts_from_a_run_of_its_backbone(backbone, tmp_path):
    start = FromRun(str(backbone.path))
    run = js.fit(
        run=tmp_path / "reward", start=start, model=WithHead(), data=pairs(tmp_path), steps=30, lr=1e-2, **SETTINGS
    )
    assert run.config.model == WithHead(backbone.config.model)
    rows = run.metrics()
    assert rows[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)  # the head is zeros
    assert rows[-1]["accuracy"] == 1 and rows[-1]["loss"] < 0.3
    _rewards_are_the_heads_outputs(js.load(run.path), tmp_path)
    # from a run with a head, that head is read as well
    more = js.fit(
        run=tmp_path / "more",
        start=FromRun(str(run.path)),
        model=WithHead(),
        data=pairs(tmp_path),
        steps=1,
        eval_batches=0,
        **SETTINGS,
    )
    assert more.metrics()[0]["loss"] < 0.3


def _rewards_are_the_heads_outputs(run, tmp_path):
    """Those of a batch are those of each answer alone, also of empty answers and longer ones than in training."""
    answers = ["acdac", "abdac", "", "a", "ccdab" * 5]
    prompts = ["x", "x", "x", "", "x"]
    got = run.rewards(prompts, answers, rows=3)
    assert got.shape == (5,) and got.dtype == np.float32 and got[0] > got[1] + 1
    module, tokens = run.model(), run.tokenizer
    forward = jax.jit(lambda ids: module.scores(module.backbone.hidden(ids)[:, -1])[0, 0])
    for reward, prompt, answer in list(zip(got, prompts, answers, strict=True))[1:]:
        ids = [tokens.eos_id, *tokens.encode(prompt), *tokens.encode(answer)]
        np.testing.assert_allclose(reward, forward(jnp.asarray([ids])), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run.rewards(prompts, answers, layout=js.Layout("data=2,tensor=2")), got, rtol=1e-4)
    assert run.rewards([], []).shape == (0,)
    user, good = {"role": "user", "content": "x"}, {"role": "assistant", "content": "acd"}
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    (tmp_path / "t.jinja").write_text(template)
    run.config = dataclasses.replace(run.config, data=preference_files("", template=str(tmp_path / "t.jinja")))
    assert np.isfinite(run.rewards([[user]], [[good]])).all()
    with raises_saying(ConfigError, "prompts = 'x': must be a list"):
        run.rewards("x", ["a"])
    with raises_saying(ConfigError, "2 prompts and 1 answers"):
        run.rewards(["x", "x"], ["a"])
    with raises_saying(ConfigError, "prompts[0] and answers[0] are both empty"):
        run.rewards([""], [""])
    with raises_saying(DataError, "must be two texts, or two lists of messages"):
        run.rewards(["x"], [[good]])
    with raises_saying(ConfigError, "classify needs a run with train.objective = @Classification()"):
        run.classify(["x"])


def test_a_language_model_gives_no_rewards(backbone):
    with raises_saying(ConfigError, "rewards needs a run with train.objective = @RewardModel()", "has @NextToken()"):
        backbone.rewards(["x"], ["y"])


def test_the_backbones_parameters_are_those_of_its_run(backbone):
    infos = describe_model(WithHead(backbone.config.model))[1]
    params = FromRun(str(backbone.path)).params(infos, js.Layout("fsdp=2"))
    assert jax.tree.structure(params) == jax.tree.structure(infos)
    assert not np.any(params["score"]["kernel"])
    for a, b in zip(jax.tree.leaves(params["backbone"]), jax.tree.leaves(backbone.params()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_differences_are_refused(backbone):
    start = FromRun(str(backbone.path))
    wide = WithHead(dataclasses.replace(backbone.config.model, width=32))
    with raises_saying(
        CheckpointError, "embed/weight is [256, 16] there and [256, 32] here", "leave out WithHead.backbone"
    ):
        start.check(describe_model(wide)[1])
    deep = WithHead(dataclasses.replace(backbone.config.model, qk_norm=True))
    with raises_saying(CheckpointError, "is missing there"):
        start.check(describe_model(deep)[1])


@pytest.mark.long
@pytest.mark.parametrize("adapters", [LoRA(rank=2), Unfreeze(("score", "norm"))], ids=["LoRA", "Unfreeze"])
def test_adapters_train_the_head(backbone, tmp_path, adapters):
    start = FromRun(str(backbone.path))
    more = dict(start=start, model=WithHead(), adapters=adapters, data=pairs(tmp_path), lr=1e-2)
    run = js.fit(run=tmp_path / "run", steps=12, eval_batches=0, **more, **SETTINGS)
    assert np.mean([row["loss"] for row in run.metrics()[-3:]]) < np.log(2) - 0.02
    assert np.any(run.params()["score"]["kernel"])


def test_without_effect(backbone):
    start = FromRun(str(backbone.path))
    with raises_saying(ConfigError, "LoRA.targets leave the new head as it is", "add 'score' to LoRA.targets"):
        TrainConfig(model=MODEL, start=start, objective=RewardModel(), adapters=LoRA(targets=("q", "v")))
    TrainConfig(model=MODEL, start=start, objective=RewardModel(), adapters=LoRA(targets=("q", "v", "score")))


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: WithHead(BACKBONE, outputs=0), ("WithHead.outputs = 0", "at least 1")),
        (lambda: WithHead(RewardModel()), ("is no language model", "@Transformer()")),
        (lambda: WithHead(MODEL), ("is no language model",)),
        (
            lambda: WithHead(dataclasses.replace(BACKBONE, parametrisation=js.optim.MuP(base_width=16))),
            ("MuP has no rule for WithHead's head", "parametrisation to None"),
        ),
        (lambda: RewardModel(margin=-1.0), ("RewardModel.margin = -1.0", "at least 0")),
        (lambda: TrainConfig(model=BACKBONE, objective=RewardModel()), ("Transformer has none", "@WithHead()")),
        (lambda: TrainConfig(model=WithHead(BACKBONE, 3), objective=RewardModel()), ("WithHead.outputs = 1", "not 3")),
        (lambda: TrainConfig(model=MODEL, objective=NextToken()), ("WithHead has no 'vocab'",)),
        (lambda: TrainConfig(model=MODEL, objective=DPO()), ("WithHead has no 'vocab'",)),
        (
            lambda: js.step.check(TrainConfig(model=WithHead(), objective=RewardModel(), layout=None)),
            ("WithHead.backbone is not set", "train.start"),
        ),
        (
            lambda: check_ids(TrainConfig(model=MODEL, objective=RewardModel(), data=preference_files("none.jsonl"))),
            ("has 256 token ids, but the model only 32",),
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(make, words):
    with raises_saying(ConfigError, *words):
        make()
