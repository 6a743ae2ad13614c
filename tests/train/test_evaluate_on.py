"""train.evaluate_on: held-out loss on corpora that nothing is trained on."""

from __future__ import annotations

import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.train.run import read_config
from tests.truth.errors import raises_saying
from tests.truth.runs import bigram

SAME, OTHER = (js.data.synthetic(32, documents=64, length=64, seed=seed) for seed in (0, 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained on one chain, and evaluated on it by another name and on another chain."""
    settings = bigram(data=SAME, evaluate_on={"same": SAME, "other": OTHER}, eval_batches=2, lr=0.3, steps=60)
    return js.fit(js.TrainConfig(**settings), run=tmp_path_factory.mktemp("further") / "run", quiet=True)


def test_the_corpus_trained_on_has_the_loss_it_has_as_a_further_one(run):
    row = run.metrics()[-1]
    assert row["eval_loss/same"] == row["eval_loss"]


def test_a_chain_that_was_not_trained_on_is_predicted_worse(run):
    row = run.metrics()[-1]
    assert row["eval_loss/other"] > row["eval_loss"] + 0.5


def test_further_corpora_are_in_the_runs_own_gin(run):
    assert read_config(run.path).evaluate_on["other"] == OTHER


@pytest.mark.parametrize(
    "corpora, message",
    [({"two words": OTHER}, "'two words'"), ({"other": js.data.synthetic}, "evaluate_on['other'] must be a corpus")],
    ids=["name", "class"],
)
def test_a_corpus_that_is_none_is_refused(corpora, message):
    with raises_saying(ConfigError, message):
        js.TrainConfig(**bigram(evaluate_on=corpora))


def test_a_further_corpus_with_more_ids_than_the_model_is_named():
    wide = js.data.synthetic(64, documents=64, length=64)
    with raises_saying(ConfigError, "64 token ids, but the model only 32"):
        js.fit(js.TrainConfig(**bigram(evaluate_on={"wide": wide}, eval_batches=1)), quiet=True)
