"""Training without stored logits gives the same results as with them, on every layout, tied or not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.step import AutoLoss, CutLoss, MaterialisedLoss, NextToken
from jaxscale.step.backprop import make_loss_and_grads
from jaxscale.train import read_config
from pallas_kernels import chosen, forget
from tests.truth.errors import raises_saying
from tests.truth.layouts import assert_layouts_agree, random_batch
from tests.truth.runs import bigram, losses

SEQ, VOCAB = 16, 64
MODEL = TransformerConfig(depth=1, vocab=VOCAB, width=32, heads=2, hidden=64, tied=True, logit_softcap=5.0)
BATCH = random_batch(VOCAB, rows=16, seq=SEQ, lengths=(7, 2, 4))


def cut(blueprint, *, objective, **options):
    """Sharded training stores no logits; the reference does."""
    return make_loss_and_grads(blueprint, objective=dataclasses.replace(objective, loss=CutLoss()), **options)


@pytest.mark.parametrize(
    "tied, layout",
    [
        (True, Layout("context=2,fsdp=2,tensor=2")),
        pytest.param(
            False, Layout("data=2,fsdp=2,tensor=2", sequence_sharded=True), marks=pytest.mark.long, id="another layout"
        ),
    ],
    ids=str,
)
def test_training_without_logits_gives_the_numbers_of_training_with_them(tied, layout):
    assert_layouts_agree(
        dataclasses.replace(MODEL, tied=tied),
        [layout],
        batch=BATCH,
        accumulate=2,
        objective=NextToken(z_loss=1e-2),
        steps=3,
        make_loss_and_grads=cut,
    )


def test_a_large_vocabulary_is_cut_by_itself():
    calls = {v: AutoLoss().of(v) for v in (256, 32767, 32768, 128256)}
    assert [type(loss) for loss in calls.values()] == [MaterialisedLoss] * 2 + [CutLoss] * 2


def test_a_run_without_logits_takes_the_same_steps_and_says_which_loss_ran(tmp_path):
    forget()
    config = bigram(objective=NextToken(MaterialisedLoss()), eval_batches=1)
    stored = js.fit(**config, run=tmp_path / "stored", quiet=True)
    assert not chosen("linear_cross_entropy")
    cut = NextToken(AutoLoss(cut_from=32))
    made = js.fit(**bigram(objective=cut, eval_batches=1), run=tmp_path / "made", quiet=True)
    assert {c.implementation for c in chosen("linear_cross_entropy")} == {"xla"}
    np.testing.assert_allclose(losses(made), losses(stored), rtol=1e-6)
    assert made.metrics()[-1]["eval_loss"] == pytest.approx(stored.metrics()[-1]["eval_loss"], rel=1e-6)
    assert made.info["loss"] == "cut cross-entropy, no logits held (a vocabulary of 32 is not below 32)"
    assert stored.info["loss"] == "cross-entropy of materialised logits"
    assert read_config(tmp_path / "made").objective.loss == AutoLoss(cut_from=32)


def test_what_a_loss_cannot_do_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="no implementation 'xlaa'.*did you mean 'xla'"):
        js.fit(**bigram(objective=NextToken(CutLoss(implementation="xlaa"))), run=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_values_out_of_range_are_refused():
    with raises_saying(ConfigError, "AutoLoss.cut_from = 0", "at least 1"):
        AutoLoss(0)
    with raises_saying(ConfigError, "NextToken.loss must be", "AutoLoss()", "not 'cut'"):
        NextToken(loss="cut")
