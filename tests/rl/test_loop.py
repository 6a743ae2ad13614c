"""Reinforcement learning on tiny models: sampler equals trainer, runs resume, failed rewards skip a step."""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import numpy as np
import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import ConfigError, DataError, RunError
from jaxscale.infer.sampling import Sampling
from jaxscale.models import TransformerConfig
from jaxscale.rl import ArithmeticReward, RLConfig, Sample
from jaxscale.rl.loop import _Loop, _prepare, reinforce
from jaxscale.rl.rewards import RewardError, rewards_of
from jaxscale.rl.rollout import Sampler, batch_of
from jaxscale.step import DAPO, GRPO, TrainConfig
from jaxscale.train.skips import read_skips

MODEL = TransformerConfig(depth=1, vocab=257, width=16, heads=2, head_dim=8, hidden=16)
CONFIG = TrainConfig(
    model=MODEL, layout=None, data=js.data.arithmetic(2), objective=GRPO(), steps=4, batch_size=8, seq_len=12, lr=0.01,
    checkpoint_every=2,
)  # fmt: skip


def small(sample):
    """A reward that varies between samples of a random model."""
    return float(sum(i < 128 for i in sample.ids[-3:])) / 3


OWN = RLConfig(small, completions=4, max_tokens=3)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(config=CONFIG, own=OWN, **options):
    return reinforce(config, own, quiet=True, **options)


def bits(trained):
    return [np.asarray(x) for x in jax.tree.leaves(trained.state.params)]


@pytest.mark.long
def test_a_stopped_run_goes_on_with_the_same_rewards_and_parameters():
    whole = run(folder="whole")
    rows = whole.metrics()
    assert len(rows) == 4 and all(0 <= r["reward"] <= 1 and r["logprob_gap_max"] < 1e-4 for r in rows)
    steps = iter([False, False, True])
    parted = run(folder="parted", stop=lambda: next(steps))
    assert parted.info["status"] == "paused" and int(parted.state.step) == 3
    again = run(folder="parted", resume="newest")
    assert [r["reward"] for r in again.metrics()] == [r["reward"] for r in rows]
    assert all(np.array_equal(a, b) for a, b in zip(bits(whole), bits(again), strict=True))
    with pytest.raises(RunError, match="already taken 4 of 4 steps"):
        run(folder="parted", resume="newest")
    other = dataclasses.replace(CONFIG, data=js.data.arithmetic(3), steps=6)
    with pytest.raises(RunError, match="the corpus is not the one"):
        run(other, folder="parted", resume="newest")


@pytest.mark.long
def test_rewards_that_raise_or_are_no_number_or_hang_skip_the_step_and_keep_the_run():
    faults = {1: lambda: 1 / 0, 2: lambda: float("nan"), 3: lambda: time.sleep(30)}
    calls = []

    def reward(samples):
        calls.append(1)
        return [faults.get(len(calls), lambda: 1.0)() for _ in samples] if len(calls) in faults else map(small, samples)

    reward.batched = True
    own = dataclasses.replace(OWN, reward=reward, reward_seconds=0.5, patience=4)
    trained = run(own=own, folder="one")
    rows = trained.metrics()
    assert [r.get("skipped", "")[:26] for r in rows] == [
        "the reward reward raised Z", "the reward reward returned", "the reward reward took lon", ""
    ]  # fmt: skip
    assert len(read_skips(trained.path / "skipped.jsonl")) == 3 and trained.info["status"] == "finished"

    def broken(sample):
        raise KeyError("no answer")

    with pytest.raises(
        RewardError, match="raised KeyError: 'no answer'; so it was in 2 steps in a row .* saved at step 2"
    ):
        run(own=dataclasses.replace(OWN, reward=broken, patience=2), folder="two")
    assert int(run(folder="two", resume="newest").state.step) == 4


@pytest.mark.long
def test_the_loop_stops_where_sampler_and_trainer_disagree():
    with pytest.raises(RunError, match="step 1: sampler and trainer give a token log-probabilities up to .* apart"):
        run(own=dataclasses.replace(OWN, largest_gap=1e-12), folder="apart")


def session(config=CONFIG, own=OWN):
    return js.session(config, prepare=functools.partial(_prepare, settings=own))


@pytest.mark.long
def test_results_of_tools_are_in_the_sequence_but_are_not_learned():
    seen = []

    def tool(sample):
        seen.append(sample)
        return "<5>" if len(seen) < 3 else None

    own = dataclasses.replace(OWN, turns=3, tool=tool)
    with session(own=own) as s:
        prompt = s.config.data.prompts()[0]
        (sample,) = Sampler(s, own).sample([prompt], [3])
        assert len(seen) == 2 or len(seen) == 3
        n = len(s.run.prompt_ids(prompt.text))
        at = "".join("g" if g else "-" for g in sample.generated)
        assert at[:n] == "-" * n and "---" in at[n:] and at.endswith("g") and "<5>" in sample.text
        batch = batch_of([sample], [1.0], 20)
        assert batch["weights"][0].sum() == sample.tokens == sum(sample.generated)
        assert (batch["logprobs"][0][batch["weights"][0] == 0] == 0).all()
        exact = s.run.generate([list(sample.ids[:n])], sampling=[Sampling(3, 1.0, seed=3)])[0]
        assert sample.logprobs[n : n + len(exact.ids)] == exact.logprobs
        assert s.forward_backward(batch_of([sample] * 8, [1.0] * 8, 20))["logprob_gap_max"] < 1e-4


@pytest.mark.parametrize(
    ("answer", "message"), [(lambda: 1 / 0, "raised ZeroDivisionError"), (lambda: 3, "returned 3")]
)
def test_a_tool_that_fails_skips_the_step(answer, message):
    own = dataclasses.replace(OWN, turns=2, tool=lambda sample: answer(), patience=1)
    with pytest.raises(RewardError, match=f"the tool <lambda> {message}"):
        run(own=own, folder="one")
    assert read_skips(js.load("one").path / "skipped.jsonl")[0]["step"] == 1


@pytest.mark.long
def test_training_without_samples_names_the_command_that_makes_them(capsys):
    run(dataclasses.replace(CONFIG, steps=1), folder="one")
    assert main(["train", "--resume", "one", "--gin.train.steps=2"]) == 2
    assert "continue with jaxscale rl CONFIG --run one --continue" in capsys.readouterr().err
    with pytest.raises(DataError, match="needs an array 'logprobs'.* jaxscale rl CONFIG --run RUN --continue"):
        js.fit(CONFIG, run="two", quiet=True)


def test_a_text_is_not_a_list_of_prompts():
    with pytest.raises(ConfigError, match="must be a list of texts; write \\['1"):
        js.rl.grpo(CONFIG, prompts="1+1=", reward=small)
    with pytest.raises(ConfigError, match="session takes a run, its folder, or a TrainConfig, not None"):
        js.session(None)


def test_dapo_draws_other_prompts_for_groups_with_one_reward():
    prompts = [p.text for p in CONFIG.data.prompts()]
    dull = set(prompts[:4])

    def reward(sample):
        return 0.5 if sample.prompt in dull else small(sample)

    own = dataclasses.replace(OWN, reward=reward)
    config = dataclasses.replace(CONFIG, objective=DAPO(resample=6))
    with session(config, own) as s:
        loop = _Loop(s, own)
        samples, _, advantages, _ = loop._samples(0)
        assert not dull & {x.prompt for x in samples} and np.any(advantages, axis=1).all()
    own = dataclasses.replace(OWN, reward=lambda sample: 1.0)
    trained = run(dataclasses.replace(config, steps=2, objective=DAPO(resample=1)), own, folder="dull")
    assert all(r["skipped"] == "all completions of each prompt have one reward" for r in trained.metrics())


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=2,tensor=2"])
def test_sampler_and_trainer_agree_on_meshes(mesh):
    config = dataclasses.replace(CONFIG, layout=js.Layout(mesh), steps=2)
    sharded, one = run(config, folder="mesh"), run(dataclasses.replace(CONFIG, steps=2), folder="one")
    assert all(r["logprob_gap_max"] < 1e-4 for r in sharded.metrics())
    assert sharded.metrics()[0]["reward"] == one.metrics()[0]["reward"]


@pytest.mark.parametrize(
    ("own", "config", "message"),
    [
        ({"completions": 3}, {}, "rl.completions = 3 does not divide train.batch_size = 8; the nearest .* is 6"),
        ({"completions": 1}, {}, "GRPO compares the completions of a prompt; set rl.completions to 2 or more"),
        ({"max_tokens": 12}, {}, "leaves no place for a prompt in train.seq_len = 12"),
        ({"max_tokens": 9}, {}, "it needs train.seq_len = 13 or more"),
        ({}, {"objective": js.step.NextToken(z_loss=1e-4)}, "reinforcement learning needs train.objective = @GRPO"),
        ({}, {"data": js.data.python_stdlib()}, "reinforcement learning needs prompts: train.data = @prompt_files"),
        ({"updates": 3}, {}, "rl.updates = 3 does not divide train.steps = 4"),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(own, config, message):
    with pytest.raises(ConfigError, match=message):
        run(dataclasses.replace(CONFIG, **config), dataclasses.replace(OWN, **own))


def test_arithmetic_rewards_exact_numbers():
    def sample(text, answer="12"):
        return Sample("7+5=", text, answer, (), (), (), "stop")

    reward = ArithmeticReward()
    assert [reward(sample(t)) for t in ("12", " 12\n", "12.0", "13", "12 or 13", "", "x")] == [1, 1, 1, 0, 0, 0, 0]
    assert ArithmeticReward(exact=False)(sample("it is 12.")) == 1
    with pytest.raises(RewardError, match="raised ValueError: the answer 'twelve' is not a number"):
        rewards_of(reward, [sample("12", "twelve")], 5)
    with pytest.raises(RewardError, match="returned None for '12'; return a number"):
        rewards_of(lambda s: None, [sample("12")], 5)


def test_pipeline_stages_are_refused_before_anything_is_compiled():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, depth=2), layout=js.Layout("pipeline=2"))
    with pytest.raises(ConfigError, match="the last pipeline stage cannot compute GRPO"):
        run(config, folder="never")
