"""Objectives of reinforcement learning: the papers' formulas in float64, and TRL's losses on the same numbers."""

from __future__ import annotations

import collections
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.step import DAPO, GRPO, GSPO, RLOO, ReMax, TrainConfig
from jaxscale.testing import check_objective

VOCAB, ROWS, SEQ = 11, 6, 7
OBJECTIVES = [
    GRPO(), GRPO(clip_low=0.1, clip_high=0.3, kl=0.04), DAPO(kl=0.1), GSPO(clip_low=0.05, clip_high=0.06), RLOO(),
    ReMax(), GRPO(entropy=0.1), DAPO(entropy=0.02),
]  # fmt: skip


def name_of(objective):
    """Return a test's name."""
    return f"{type(objective).__name__}-{objective.kl}-{objective.entropy}"


def batch_of() -> dict[str, np.ndarray]:
    """Sampled tokens of different counts, one row whose tokens include a tool's, and one that is padding."""
    random = np.random.default_rng(3)
    tokens = random.integers(0, VOCAB, (ROWS, SEQ + 1))
    weights = np.zeros((ROWS, SEQ), np.float32)
    for row, (first, last) in enumerate([(1, 7), (2, 5), (0, 7), (3, 4), (1, 6), (0, 0)]):
        weights[row, first:last] = 1
    weights[2, 3:5] = 0
    return {
        "tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32), "weights": weights,
        "logprobs": (random.normal(size=(ROWS, SEQ)) * 0.4 - 2.4).astype(np.float32),
        "advantages": random.normal(size=ROWS).astype(np.float32), "rows": np.arange(ROWS, dtype=np.int32),
    }  # fmt: skip


class Table(nnx.Module):
    """The smallest language model: a token's hidden state is a row of a table."""

    logit_softcap = None

    def __init__(self, table, head):
        self.table, self.head = table, head

    def hidden(self, tokens, **_):
        return self.table[tokens]

    def head_weight(self):
        return self.head


def tables(seed):
    random = np.random.default_rng(seed)
    return random.normal(size=(VOCAB, 4)), random.normal(size=(VOCAB, 4))


def every_logprob(table, head, batch):
    logits = table[batch["tokens"]] @ head.T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def logprobs(table, head, batch):
    return np.take_along_axis(every_logprob(table, head, batch), batch["targets"][..., None], 2)[..., 0]


def entropies(table, head, batch):
    every = every_logprob(table, head, batch)
    return -(np.exp(every) * every).sum(-1)


def by_formula(objective, table, head, batch):
    """The objective's paper, token by token in float64."""
    new, first = logprobs(table, head, batch), logprobs(*tables(2), batch)
    entropy, bonus = entropies(table, head, batch), 0.0
    total, sequences, tokens = 0.0, 0, 0
    low = -math.inf if objective.clip_low is None else 1 - objective.clip_low
    high = math.inf if objective.clip_high is None else 1 + objective.clip_high
    for row in range(ROWS):
        places = [t for t in range(SEQ) if batch["weights"][row, t]]
        if not places:
            continue
        apart = [new[row, t] - float(batch["logprobs"][row, t]) for t in places]
        losses = []
        for d in apart:
            match objective:
                case GSPO():
                    ratio = math.exp(sum(apart) / len(apart))
                case RLOO():
                    ratio = math.exp(sum(apart))
                case _:
                    ratio = math.exp(d)
            advantage = float(batch["advantages"][row])
            losses.append(-min(ratio * advantage, min(max(ratio, low), high) * advantage))
        if objective.kl:
            losses = [
                x + objective.kl * (math.exp(first[row, t] - new[row, t]) - (first[row, t] - new[row, t]) - 1)
                for x, t in zip(losses, places, strict=True)
            ]
        bonus += sum(entropy[row, t] for t in places)
        total += sum(losses) if isinstance(objective, DAPO) else sum(losses) / len(places)
        sequences, tokens = sequences + 1, tokens + len(places)
    return total / (tokens if isinstance(objective, DAPO) else sequences) - objective.entropy * bonus / tokens


def ours(objective, table, head, batch):
    def value(arrays):
        reference = Table(*map(jnp.float32, tables(2))) if objective.reference else None
        terms = objective.terms(Table(*arrays), batch, reference=reference)
        totals = terms | objective.weights(batch, 1)
        return objective.value(totals), objective.metrics(totals)

    arrays = (jnp.asarray(table, jnp.float32), jnp.asarray(head, jnp.float32))
    (loss, metrics), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(arrays)
    return float(loss), jax.tree.map(np.asarray, grads), metrics


@pytest.mark.parametrize("objective", OBJECTIVES, ids=name_of)
def test_losses_and_gradients_are_those_of_the_paper_in_float64(objective):
    batch = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in batch_of().items()}
    table, head = tables(1)
    loss, grads, metrics = ours(objective, table, head, batch_of())
    mean = (entropies(table, head, batch) * batch["weights"]).sum() / batch["weights"].sum()
    assert metrics["entropy"] == pytest.approx(mean, rel=1e-5)
    assert loss == pytest.approx(by_formula(objective, table, head, batch), rel=1e-5)
    random = np.random.default_rng(0)
    for which in range(2):
        arrays = [table, head]
        for _ in range(4):  # along random directions
            direction = random.normal(size=table.shape)
            sides = []
            for sign in (1, -1):
                moved = [a + sign * 1e-6 * direction if i == which else a for i, a in enumerate(arrays)]
                sides.append(by_formula(objective, *moved, batch))
            assert np.sum(grads[which] * direction) == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("objective", [RLOO(), ReMax(), GRPO()], ids=lambda o: type(o).__name__)
def test_samples_far_from_the_model_have_finite_losses_and_gradients(objective):
    batch = batch_of()
    for advantages in (np.ones(ROWS), np.zeros(ROWS), -np.ones(ROWS)):
        far = {**batch, "logprobs": batch["logprobs"] - 40, "advantages": advantages.astype(np.float32)}
        loss, grads, _ = ours(objective, *tables(1), far)
        assert np.isfinite(loss) and all(np.isfinite(x).all() for x in grads)


def test_the_gap_between_sampler_and_trainer_is_measured_on_every_generated_token():
    batch, (table, head) = batch_of(), tables(1)
    exact = logprobs(table, head, batch)
    batch["logprobs"] = np.where(batch["weights"] > 0, exact, 99).astype(np.float32)
    metrics = ours(GRPO(), table, head, batch)[2]
    assert metrics["logprob_gap_max"] < 3e-6
    batch["logprobs"][4, 2] += 0.01
    metrics = ours(GRPO(), table, head, batch)[2]
    assert 0.01 <= metrics["logprob_gap_max"] < 0.012
    assert metrics["logprob_gap"] == pytest.approx(0.01 / batch["weights"].sum(), rel=1e-3)
    batch["logprobs"][4, 2] = np.nan
    assert ours(GRPO(), table, head, batch)[2]["logprob_gap_max"] == np.inf


def test_advantages_are_those_of_the_papers():
    rewards = np.array([[1.0, 0, 0, 1], [2, 2, 2, 2]])
    each = GRPO().advantages(rewards)
    np.testing.assert_allclose(each[0], np.array([1, -1, -1, 1]) * 0.5 / (math.sqrt(1 / 3) + 1e-4), rtol=1e-6)
    assert not each[1].any() and (GRPO(scale=False).advantages(rewards)[0] == [0.5, -0.5, -0.5, 0.5]).all()
    np.testing.assert_allclose(RLOO().advantages(rewards)[0], [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-6)
    assert (ReMax().advantages(rewards, np.array([1.0, 0.5])) == [[0, -1, -1, 0], [1.5] * 4]).all()
    lengths = np.array([[5, 8, 9, 10]])
    assert (DAPO(overlong=4).shaped(np.ones((1, 4)), lengths, 10) == [[1, 0.5, 0.25, 0]]).all()


def test_terms_of_micro_batches_add_up():
    model = TransformerConfig(depth=1, vocab=VOCAB, width=8, heads=1, hidden=8)
    check_objective(TrainConfig(model=model, layout=None, objective=DAPO(), seq_len=SEQ), batch_of())


def test_a_greedy_baseline_lowers_the_variance_of_reinforce():
    """Three arms with rewards far from zero: gradients by the logits, over samples of a softmax policy."""
    random, rewards, logits = np.random.default_rng(0), np.array([2.0, 3.0, 2.5]), np.array([0.2, 0.5, -0.1])
    p = np.exp(logits) / np.exp(logits).sum()
    arms = random.choice(3, 4000, p=p)
    scores = np.eye(3)[arms] - p
    plain = scores * rewards[arms][:, None]
    advantages = ReMax().advantages(rewards[arms][:, None], np.full(4000, rewards[np.argmax(logits)]))
    remax = scores * advantages
    exact = p * (rewards - p @ rewards)
    assert np.abs(remax.mean(0) - exact).max() < 0.03 and np.abs(plain.mean(0) - exact).max() < 0.08
    assert remax.var(0).sum() < 0.1 * plain.var(0).sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRPO(clip_low=1.5), "GRPO.clip_low = 1.5: must be above 0 and at most 1"),
        (lambda: GSPO(clip_high=-1.0), "GSPO.clip_high = -1.0"),
        (lambda: GRPO(clip_low="0.2"), "GRPO.clip_low = '0.2': must be above 0"),
        (lambda: RLOO(kl=-1.0), "RLOO.kl = -1.0: must be at least 0"),
        (lambda: GSPO(entropy=math.inf), "GSPO.entropy = inf: must be at least 0 and finite"),
        (lambda: DAPO(resample=0.5), "DAPO.resample = 0.5: must be a whole number"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.torch
@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if not isinstance(o, ReMax)], ids=name_of)
def test_losses_and_gradients_are_those_of_trl(objective):
    """TRL's own `_compute_loss`, with the model's log-probabilities as its input."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("trl")
    from trl import GRPOTrainer, RLOOTrainer

    batch = {k: v[:-1] for k, v in batch_of().items()}  # TRL also counts a sequence without tokens
    arrays = [torch.tensor(a, dtype=torch.float32, requires_grad=True) for a in tables(1)]
    ids = torch.tensor(batch["targets"], dtype=torch.int64)

    def of(table, head):
        every = torch.log_softmax(table[torch.tensor(batch["tokens"], dtype=torch.int64)] @ head.T, -1)
        return torch.gather(every, 2, ids[..., None])[..., 0], -(every.exp() * every).sum(-1)

    (new, entropy), mask = of(*arrays), torch.tensor(batch["weights"])
    first = of(*(torch.tensor(a, dtype=torch.float32) for a in tables(2)))[0]
    old = torch.tensor(batch["logprobs"])
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, entropy, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        beta=objective.kl, importance_sampling_level="sequence" if isinstance(objective, GSPO) else "token",
        _entropy_bonus_enabled=objective.entropy > 0, entropy_coef=objective.entropy, use_adaptive_entropy=False,
        loss_type="dapo" if isinstance(objective, DAPO) else "grpo", model=torch.nn.Linear(1, 1).eval(),
        epsilon_low=objective.clip_low, epsilon_high=objective.clip_high, current_gradient_accumulation_steps=1,
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        _metrics={"eval": collections.defaultdict(list)},
    )  # fmt: skip
    inputs = {
        "prompt_ids": ids[:, :0], "prompt_mask": mask[:, :0], "completion_ids": ids, "completion_mask": mask,
        "advantages": torch.tensor(batch["advantages"]), "old_per_token_logps": old, "ref_per_token_logps": first,
        "num_items_in_batch": mask.sum(), "old_logps": (old * mask).sum(1),
    }  # fmt: skip
    kind = RLOOTrainer if isinstance(objective, RLOO) else GRPOTrainer
    theirs = kind._compute_loss(trainer, None, inputs)
    theirs.backward()
    loss, grads, _ = ours(objective, *tables(1), batch)
    assert loss == pytest.approx(theirs.item(), rel=2e-5)
    for mine, array in zip(grads, arrays, strict=True):
        np.testing.assert_allclose(mine, array.grad.numpy(), rtol=2e-4, atol=2e-6)
