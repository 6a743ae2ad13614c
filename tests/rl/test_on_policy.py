"""Distillation on the student's own samples, and sampling on another layout than that of training."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.infer.sampling import Sampling
from jaxscale.models import TransformerConfig
from jaxscale.rl import RLConfig
from jaxscale.rl.loop import _Loop, _prepare, reinforce
from jaxscale.step import DAPO, GRPO, Distill, JensenShannon, OnPolicyDistill, ReMax, TrainConfig, describe_model
from jaxscale.step.objective import terms_of
from jaxscale.testing import random_params
from jaxscale.train import FromRun
from tests.rl.test_loop import CONFIG, MODEL, OWN, bits, small
from tests.truth.errors import raises_saying

TEACHER = TransformerConfig(depth=1, vocab=257, width=16, heads=2, head_dim=8, hidden=32)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "run"
    config = dataclasses.replace(CONFIG, model=TEACHER, objective=js.step.NextToken(), packing="fit", eval_batches=0)
    return js.fit(config, steps=20, lr=0.02, run=path, quiet=True)


def samples():
    """A batch of 4 sampled rows, of which each has some generated tokens."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 257, (4, 13)).astype(np.int32)
    weights = (np.arange(12) >= random.integers(2, 9, 4)[:, None]).astype(np.float32)
    logprobs = (weights * -5 + 0.1 * random.standard_normal((4, 12))).astype(np.float32)
    advantages = np.array([1.0, -1.0, 0.5, -0.5], np.float32)
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights, "logprobs": logprobs}
    return {**rows, "advantages": advantages, "rows": np.arange(4, dtype=np.int32)}


def totals_of(objective, batch):
    models = []
    for config, seed in ((MODEL, 1), (TEACHER, 2)):
        graphdef, infos = describe_model(config)
        models.append(nnx.merge(graphdef, jax.tree.map(jnp.asarray, random_params(infos, seed=seed))))
    reference = models[1] if objective.reference else None
    return terms_of(objective, models[0], batch, reference=reference) | objective.weights(batch, 1)


@pytest.mark.long
def test_the_loss_is_that_of_distill_on_samples_plus_that_of_the_policy_gradient():
    batch, start = samples(), FromRun("x")
    off, policy = Distill(start, JensenShannon(0.3), 2.0), GRPO()
    on = OnPolicyDistill(start, JensenShannon(0.3), 2.0)
    both = dataclasses.replace(on, rewards=policy, reward_weight=0.5)
    values = [float(o.value(totals_of(o, batch))) for o in (off, policy, on, both)]
    np.testing.assert_allclose(values[2], values[0], rtol=1e-6)
    np.testing.assert_allclose(values[3], values[0] + 0.5 * values[1], rtol=1e-5)
    metrics, alone = both.metrics(totals_of(both, batch)), policy.metrics(totals_of(policy, batch))
    for name in ("logprob_gap", "logprob_gap_max", "clipped"):
        np.testing.assert_allclose(metrics[name], alone[name], rtol=1e-5)


def distilled(teacher, folder, **more):
    options = dict(batch_size=8, seq_len=12, max_tokens=3, lr=0.02, completions=2, quiet=True, steps=25) | more
    student = TrainConfig(model=MODEL, layout=None)
    return js.rl.distill(student, teacher=teacher, prompts=js.data.arithmetic(2), folder=folder, **options)


@pytest.mark.long
def test_a_student_comes_nearer_to_its_teacher_without_a_reward(teacher):
    trained = distilled(teacher, "whole")
    rows = trained.metrics()
    divergence = [r["divergence"] for r in rows]
    assert np.mean(divergence[-5:]) < 0.5 * np.mean(divergence[:5])
    assert all(r["logprob_gap_max"] < 1e-4 and "reward" not in r for r in rows)
    assert trained.info["teacher"]["step"] == 20


@pytest.mark.long
def test_a_stopped_run_goes_on_with_its_teacher(teacher):
    steps = iter([False, True])
    distilled(teacher, "parted", steps=3, stop=lambda: next(steps))
    parted = distilled(teacher, "parted", steps=3, resume="newest")
    assert all(np.array_equal(a, b) for a, b in zip(bits(parted), bits(distilled(teacher, "a", steps=3)), strict=True))


@pytest.mark.long
def test_the_command_distils_with_rewards_beside_on_another_layout(teacher, tmp_path, capsys):
    (tmp_path / "c.gin").write_text(f"""
train.model = @Transformer()
Transformer.depth = 1
Transformer.vocab = 257
Transformer.width = 16
Transformer.heads = 2
train.data = @arithmetic()
arithmetic.largest = 2
train.objective = @OnPolicyDistill()
OnPolicyDistill.teacher = @FromRun()
OnPolicyDistill.rewards = @DAPO()
FromRun.path = "{teacher.path}"
train.layout = @Layout()
Layout.mesh = "fsdp=4"
rl.sampling_layout = @sampling/Layout()
sampling/Layout.mesh = "tensor=2"
rl.sampling_apart = True
rl.reward = @ArithmeticReward()
rl.completions = 4
rl.max_tokens = 3
train.seq_len = 12
train.batch_size = 8
train.steps = 2
""")
    assert main(["rl", "c.gin", "--run", "r"]) == 0
    assert "divergence " in capsys.readouterr().out
    rows = js.load("r").metrics()
    assert all(0 <= r["reward"] <= 1 and "reward_loss" in r and r["logprob_gap_max"] < 1e-4 for r in rows)
    assert main(["rl", "c.gin", "--run", "r", "--continue", "--gin.train.steps=3"]) == 0
    assert len(js.load("r").metrics()) == 3


LAYOUTS = [
    ("fsdp=8", dict(sampling_layout=js.Layout("data=4,tensor=2"))),
    ("fsdp=4", dict(sampling_layout=js.Layout("data=2,tensor=2"), sampling_apart=True)),
]


@pytest.mark.long
@pytest.mark.parametrize("mesh,own", LAYOUTS, ids=["all devices", "other devices"])
def test_samples_of_another_layout_are_those_of_the_training_layout(mesh, own):
    layout = None if mesh is None else js.Layout(mesh)
    config, own = dataclasses.replace(CONFIG, layout=layout), dataclasses.replace(OWN, **own)
    prompts = config.data.prompts()[:4]
    with js.session(config, prepare=functools.partial(_prepare, settings=own)) as s:
        loops = [_Loop(s, settings) for settings in (OWN, own)]
        for step in (0, 1):
            same, other = (loop.sampler.sample(prompts, [0] * 4, greedy=True) for loop in loops)
            for a, b in zip(same, other, strict=True):
                assert a.ids == b.ids
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
            assert {d.id for x in jax.tree.leaves(s.state.params) for d in x.devices()} == set(
                range(1 if layout is None else layout.devices)
            )
            if step == 0:
                loops[1].steps()  # the engine on the other layout gets the new parameters
                assert s.run.metrics()[-1]["logprob_gap_max"] < 1e-4


@pytest.mark.long
def test_adapters_are_sampled_on_another_layout_without_reading_their_base_again(teacher, monkeypatch):
    config = dataclasses.replace(
        CONFIG,
        model=TEACHER,
        start=FromRun(str(teacher.path)),
        adapters=js.step.LoRA(rank=2),
        layout=js.Layout("fsdp=2"),
    )
    with js.session(config, prepare=functools.partial(_prepare, settings=OWN)) as s:
        monkeypatch.setattr(FromRun, "params", None)
        greedy = Sampling(3, 0.0)
        own, placed = (
            s.sample([[1, 2], [3]], sampling=greedy, layout=layout) for layout in (None, js.Layout("tensor=2"))
        )
        assert [x.ids for x in own] == [x.ids for x in placed]


def test_what_does_not_fit_is_refused(teacher):
    good = FromRun(str(teacher.path))

    def run(objective=CONFIG.objective, reward=small, layout=None, **own):
        config = dataclasses.replace(CONFIG, objective=objective, layout=layout)
        return reinforce(config, dataclasses.replace(OWN, reward=reward, **own), folder="never", quiet=True)

    tensor16, tensor3 = js.Layout("tensor=16"), js.Layout("tensor=3")
    for make, kind, words in (
        (lambda: OnPolicyDistill(good, cross_entropy=1.0), ConfigError, ("set OnPolicyDistill.cross_entropy to 0",)),
        (lambda: OnPolicyDistill(top=3), ConfigError, ("set OnPolicyDistill.top to 0",)),
        (lambda: OnPolicyDistill(good, rewards=GRPO(kl=0.1)), ConfigError, ("kl = 0.1", "set GRPO.kl to 0")),
        (lambda: OnPolicyDistill(good, rewards=DAPO(entropy=0.1)), ConfigError, ("= 0.1", "set DAPO.entropy to 0")),
        (lambda: OnPolicyDistill(good, rewards=Distill(good)), ConfigError, ("such as GRPO()",)),
        (lambda: run(Distill(good)), ConfigError, ("@OnPolicyDistill(), not Distill",)),
        (lambda: run(reward=None), ConfigError, ("GRPO learns from rewards; set rl.reward",)),
        (lambda: run(OnPolicyDistill(good, rewards=DAPO()), None), ConfigError, ("set rl.reward",)),
        (lambda: RLConfig(small, sampling_layout="tensor=2"), ConfigError, ("must be a Layout",)),
        (lambda: RLConfig(small, sampling_apart=True), ConfigError, ("needs rl.sampling_layout",)),
        (lambda: run(sampling_layout=tensor16), LayoutError, ("16 devices",)),
        (lambda: run(sampling_layout=tensor3), LayoutError, ("tensor=3",)),
        (
            lambda: run(layout=js.Layout("fsdp=8"), sampling_layout=js.Layout("data=2"), sampling_apart=True),
            LayoutError,
            ("needs 2 devices beside the 8 of training, and there are 0", "rl.sampling_apart = False"),
        ),
    ):
        with raises_saying(kind, *words):
            make()
    assert OnPolicyDistill(good, rewards=ReMax()).greedy_baseline and not OnPolicyDistill(good).greedy_baseline
    assert OnPolicyDistill(good, rewards=GRPO()).least_group == 2
