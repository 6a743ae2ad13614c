"""Preference objectives against TRL: the same model, reference and batch give the same loss and gradients."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.convert.pretrained import import_checkpoint
from jaxscale.models import WithHead
from jaxscale.step import (
    DPO,
    IPO,
    KTO,
    ORPO,
    ForwardKL,
    JensenShannon,
    OnPolicyDistill,
    ReverseKL,
    RewardModel,
    SimPO,
    describe_model,
)
from jaxscale.step.objective import terms_of
from jaxscale.train import FromRun
from tests.truth.hf_folder import CONFIG, tensors, write_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.torch

VOCAB = CONFIG["vocab_size"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model to train and its reference, as Hugging Face folders, and as our parameters."""
    root = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(7)
    moved = {k: x + 0.05 * random.standard_normal(x.shape, np.float32) for k, x in tensors().items()}
    both = [write_folder(root / "policy", moved), write_folder(root / "reference")]
    runs = [import_checkpoint(f, f.with_name(f"{f.name}_run"), say=lambda _: None) for f in both]
    return both, describe_model(runs[0].config.model)[0], [run.params() for run in runs], runs[0]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w2", pad_token="w3", unk_token="w0", bos_token=None
    )


def words(random, low, high):
    return " ".join(f"w{i}" for i in random.integers(4, VOCAB, random.integers(low, high)))


def lines(rated):
    random = np.random.default_rng(1)
    for i in range(4):
        prompt = words(random, 2, 6) + " "
        if rated:
            yield {"prompt": prompt, "completion": words(random, 2, 7), "label": i % 3 != 1}
        else:
            yield {"prompt": prompt, "chosen": words(random, 2, 7), "rejected": words(random, 2, 7)}


def trainer_of(kind, config, folders, tokenizer, tmp_path, rated=False, **settings):
    load = transformers.AutoModelForCausalLM.from_pretrained
    both = [load(f, dtype=torch.float32) for f in folders]
    args = config(
        output_dir=str(tmp_path), per_device_train_batch_size=4, report_to=[], use_cpu=True, max_length=64,
        bf16=False, fp16=False, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    reference = {"ref_model": both[1]} if kind in (trl.DPOTrainer, trl.KTOTrainer) else {}
    rows = datasets.Dataset.from_list(list(lines(rated)))
    made = kind(model=both[0], args=args, train_dataset=rows, processing_class=tokenizer, **reference)
    made.model.eval()  # no dropout
    return made, next(iter(made.get_train_dataloader()))


def loss_and_gradients(trainer, batch):
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    named = dict(trainer.model.named_parameters())
    return float(loss.detach()), *(named[n].grad.numpy() for n in ("lm_head.weight", "model.embed_tokens.weight"))


def rows_of(ids, mask):
    """Our arrays from padded token ids and the mask of completions, (B, S + 1)."""
    ids, mask = np.asarray(ids, np.int32), np.asarray(mask, np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": mask[:, 1:]}


def interleaved(first, second):
    width = max(first["tokens"].shape[1], second["tokens"].shape[1])

    def wide(x):
        return np.pad(x, [(0, 0), (0, width - x.shape[1])])

    return {k: np.stack([wide(first[k]), wide(second[k])], 1).reshape(-1, width) for k in first}


def ours(objective, folders, batch):
    _, graphdef, (params, reference), _ = folders

    def value(params):
        terms = terms_of(objective, nnx.merge(graphdef, params), batch, reference=nnx.merge(graphdef, reference))
        return objective.value(terms | objective.weights(batch, 1))

    loss, grads = jax.jit(jax.value_and_grad(value))(jax.tree.map(jnp.asarray, params))
    return float(loss), np.asarray(grads["head"]["weight"]), np.asarray(grads["embed"]["weight"])


def agree(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.shape == b.shape and np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)


@pytest.mark.parametrize(
    "objective,settings",
    [(DPO(0.3), {"beta": 0.3}), (IPO(0.2), {"beta": 0.2, "loss_type": "ipo"})],
    ids=["DPO", "IPO"],
)
def test_pairs_with_a_reference(objective, settings, folders, tokenizer, tmp_path):
    trainer, batch = trainer_of(trl.DPOTrainer, trl.DPOConfig, folders[0], tokenizer, tmp_path, **settings)
    rows = rows_of(batch["input_ids"], batch["completion_mask"])
    halves = [{k: x[at] for k, x in rows.items()} for at in (slice(0, 4), slice(4, 8))]
    agree(ours(objective, folders, interleaved(*halves)), loss_and_gradients(trainer, batch))


def answers(batch, which):
    """Our arrays of TRL's older collators, whose labels are -100 at prompts."""
    return rows_of(batch[f"{which}_input_ids"], batch[f"{which}_labels"] != -100)


def test_simpo(folders, tokenizer, tmp_path):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    settings = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7}
    trainer, batch = trainer_of(CPOTrainer, CPOConfig, folders[0], tokenizer, tmp_path, **settings)
    rows = interleaved(answers(batch, "chosen"), answers(batch, "rejected"))
    agree(ours(SimPO(2.0, 0.7), folders, rows), loss_and_gradients(trainer, batch))


def test_orpo(folders, tokenizer, tmp_path):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer, batch = trainer_of(ORPOTrainer, ORPOConfig, folders[0], tokenizer, tmp_path, beta=0.3)
    rows = interleaved(answers(batch, "chosen"), answers(batch, "rejected"))

    def paper(model, batch):
        """TRL's odds ratio, and the cross-entropy of answers alone; TRL's has the prompts as well."""
        chosen, rejected, logits, *_ = trainer.concatenated_forward(model, batch)
        labels = batch["chosen_labels"]
        labels = torch.nn.functional.pad(labels, (0, logits.shape[1] - labels.shape[1]), value=-100)
        nats = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
        return nats - trainer.odds_ratio_loss(chosen, rejected)[0].mean()

    trainer.compute_loss = paper
    agree(ours(ORPO(0.3), folders, rows), loss_and_gradients(trainer, batch))


def test_kto(folders, tokenizer, tmp_path):
    settings = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    trainer, batch = trainer_of(trl.KTOTrainer, trl.KTOConfig, folders[0], tokenizer, tmp_path, rated=True, **settings)
    own, other = (rows_of(batch[f"{k}input_ids"], batch[f"{k}completion_mask"]) for k in ("", "KL_"))
    rows = interleaved(own, other) | {"desirable": np.repeat(np.asarray(batch["label"], np.float32), 2)}
    agree(ours(KTO(0.3, 1.5, 0.5), folders, rows), loss_and_gradients(trainer, batch))
    assert trainer._metrics["eval"]["kl"][-1] > 0  # else the baseline is not compared


@pytest.mark.parametrize("margin,center", [(0.0, 0.0), (0.4, 0.2)])
def test_reward_model(margin, center, folders, tokenizer, tmp_path):
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(folders[0][0], num_labels=1, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id)
    args = trl.RewardConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, report_to=[], use_cpu=True, max_length=64,
        bf16=False, fp16=False, gradient_checkpointing=False, center_rewards_coefficient=center or None,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{**line, "margin": margin} if margin else line for line in lines(rated=False)])
    trainer = trl.RewardTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        trainer.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    kernel = trainer.model.score.weight.detach().numpy().T.copy()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    named = dict(trainer.model.named_parameters())
    want = float(loss.detach()), *(named[n].grad.numpy() for n in ("score.weight", "model.embed_tokens.weight"))

    ids, mask = (np.asarray(batch[k]) for k in ("input_ids", "attention_mask"))
    arrays = {"tokens": ids.astype(np.int32), "weights": mask.astype(np.float32)}
    pairs = interleaved(*({k: x[at] for k, x in arrays.items()} for at in (slice(0, 4), slice(4, 8))))
    config = WithHead(folders[3].config.model)
    objective, graphdef = RewardModel(margin, center), describe_model(config)[0]

    def value(params):
        terms = terms_of(objective, nnx.merge(graphdef, params), pairs, reference=None)
        return objective.value(terms | objective.weights(pairs, 1))

    params = jax.tree.map(jnp.asarray, {"backbone": folders[2][0], "score": {"kernel": kernel}})
    got, grads = jax.jit(jax.value_and_grad(value))(params)
    embed = np.array(grads["backbone"]["embed"]["weight"])
    embed[tokenizer.pad_token_id] = 0  # PyTorch's Embedding leaves out the gradient of the padding token, also in texts
    agree((float(got), np.asarray(grads["score"]["kernel"]).T, embed), want)


@pytest.mark.parametrize("divergence,beta", [(ForwardKL(), 0.0), (JensenShannon(0.3), 0.3), (ReverseKL(), 1.0)])
def test_on_policy_distillation_is_generalised_knowledge_distillation(divergence, beta, folders):
    from trl.experimental.gkd import GKDTrainer

    load = transformers.AutoModelForCausalLM.from_pretrained
    student, teacher = (load(f, dtype=torch.float32).eval() for f in folders[0])
    random = np.random.default_rng(5)
    ids = random.integers(4, VOCAB, (4, 12))
    generated = (np.arange(12) >= random.integers(2, 8, 4)[:, None]) & (np.arange(12) < 11)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": np.where(generated, ids, -100)}
    own = types.SimpleNamespace(teacher_model=teacher, beta=beta, generalized_jsd_loss=GKDTrainer.generalized_jsd_loss)
    loss = GKDTrainer.compute_loss(own, student, {k: torch.asarray(x) for k, x in batch.items()})
    loss.backward()
    named = dict(student.named_parameters())
    want = float(loss.detach()), *(named[n].grad.numpy() for n in ("lm_head.weight", "model.embed_tokens.weight"))
    rows = rows_of(ids, generated) | {"logprobs": np.zeros((4, 11), np.float32), "advantages": np.zeros(4, np.float32)}
    agree(ours(OnPolicyDistill(FromRun("teacher"), divergence), folders, rows), want)
