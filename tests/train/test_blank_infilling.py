"""GLM's blank infilling: rows, the mask of the paper on every kernel, layouts, and the embedding's smaller gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.data import ByteTokenizer, infilled, python_stdlib, synthetic
from jaxscale.errors import ConfigError, DataError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import Mamba2, RingAttention, dot_product_attention, flash_attention
from jaxscale.step import BlankInfilling, TrainConfig, describe_model
from jaxscale.testing import assert_layouts_agree
from tests.truth.errors import raises_saying

LENGTH, TEXT = 32, 28


class Texts:
    """Rows of known tokens."""

    name, fingerprint, vocab_size, seq_len = "texts", "0", 60, TEXT

    def __len__(self):
        return 8

    def source(self, tokenizer, *, seq_len, **options):
        assert seq_len == TEXT
        return self

    def rows(self, ids):
        texts = np.random.default_rng(0).integers(0, 60, (8, TEXT)).astype(np.int32)[ids]
        return {"targets": texts, "weights": np.where(texts % 5, 1, 0.5).astype(np.float32)}


def _batch(**settings):
    source = infilled(Texts(), rate=0.2, **settings).source(None, seq_len=LENGTH, split="train")
    return source, source.rows(np.arange(8))


def _spans(row):
    """The spans of a row by the paper: (first column, last column) of each, from [sop] on, in order."""
    starts = [i for i, t in enumerate(row["tokens"]) if t == 62]
    ends = [i for i, t in enumerate(row["targets"]) if t == 63]
    return list(zip(starts, ends, strict=True))


def _mask(row):
    """The mask of the paper, from the spans alone: entry (q, k) is whether q attends to k."""
    spans, seen = _spans(row), np.zeros((LENGTH, LENGTH), bool)
    context = spans[0][0]
    seen[:context, :context] = True
    for q in range(context, LENGTH):
        seen[q, : q + 1] = True
    return seen


@pytest.mark.parametrize("short", [0.0, 1.0])
def test_a_row_is_the_text_with_blanks_and_then_what_belongs_there(short):
    source, batch = _batch(short=short)
    assert source.vocab_size == 64
    texts = Texts().rows(np.arange(8))
    cuts = set()
    for n in range(8):
        row = {k: v[n] for k, v in batch.items()}
        spans, (blank,) = _spans(row), {61} if short == 0 else {60}
        context = spans[0][0]
        blanks = np.flatnonzero(row["tokens"][:context] == blank)
        assert len(blanks) == len(spans) and (short == 1 or list(blanks) == [context - 1])
        assert not row["weights"][:context].any() and not row["weights"][spans[-1][1] + 1 :].any()
        np.testing.assert_array_equal(row["positions"][:context], np.arange(context))
        pieces = {}
        for first, last in spans:
            np.testing.assert_array_equal(row["tokens"][first + 1 : last + 1], row["targets"][first:last])
            place = row["positions"][first : last + 1]
            at = context - 1
            if short:
                assert len(set(place)) == 1
                at = place[0]
            else:
                np.testing.assert_array_equal(place, np.arange(context, last + 1))
            pieces[at] = row["targets"][first:last], row["weights"][first : last + 1]
        assert sorted(pieces) == list(blanks)
        text, weights = [], []
        for column in range(context):
            piece, learned = pieces.get(column, (row["tokens"][column : column + 1], [None, None]))
            text += [*piece]
            weights += [*learned[:-1]]
        np.testing.assert_array_equal(text, texts["targets"][n])
        assert all(w is None or w == true for w, true in zip(weights, texts["weights"][n], strict=True))
        cuts.add(tuple(spans))
    assert len(cuts) > 4  # rows differ


@pytest.mark.parametrize("name", ["xla", "flash", "ring"])
def test_every_kernel_computes_attention_by_the_mask_of_the_paper(name):
    _, batch = _batch(short=0.5)
    q, k, v = np.random.default_rng(1).normal(size=(3, 8, LENGTH, 2, 4)).astype(np.float32)
    want = np.zeros_like(v, np.float64)
    for n in range(8):
        scores = np.einsum("shd,thd->hst", q[n], k[n], dtype=np.float64) / 2
        scores = np.where(_mask({key: x[n] for key, x in batch.items()}), scores, -np.inf)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        want[n] = np.einsum("hst,thd->shd", weights, v[n])
    kernel = {"xla": dot_product_attention, "flash": flash_attention, "ring": RingAttention()}[name]
    order, places = np.arange(LENGTH), jnp.asarray(batch["mask_positions"])
    if name != "ring":
        got = kernel(q, k, v, causal=True, positions=places)
    else:
        layout = js.Layout("context=4")
        with layout:
            order = kernel.order(LENGTH)
            got = jax.jit(kernel)(*(jnp.asarray(x[:, order]) for x in (q, k, v)), positions=places[:, order])
    np.testing.assert_allclose(got, want[:, order], rtol=1e-5, atol=1e-6)


MODEL = TransformerConfig(vocab=64, depth=2, width=16, heads=2, attention=RingAttention(), embed_gradient=0.1)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["tensor=2,context=2", "fsdp=2,pipeline=2,context=2"])
def test_training_gives_the_same_numbers_on_every_layout(mesh):
    _, batch = _batch()
    assert_layouts_agree(MODEL, [js.Layout(mesh)], batch=batch, objective=BlankInfilling(), steps=1)


def test_the_embedding_gets_a_share_of_its_gradient():
    graphdef, infos = describe_model(MODEL)
    params = js.testing.random_params(infos)
    tokens, weights = np.array([[1, 2, 1]]), np.random.default_rng(2).normal(size=(1, 3, 16)).astype(np.float32)

    def value(embed):
        return jnp.sum(nnx.merge(graphdef, params | {"embed": {"weight": embed}}).begin(tokens) * weights)

    embed = params["embed"]["weight"]
    total, got = jax.value_and_grad(value)(embed)
    np.testing.assert_allclose(got[1], 0.1 * (weights[0, 0] + weights[0, 2]), rtol=1e-5)
    np.testing.assert_allclose(total, np.sum(embed[tokens] * weights), rtol=1e-5)


def test_what_does_not_fit_is_said():
    plain = TrainConfig(model=TransformerConfig(vocab=261), layout=None, objective=BlankInfilling(), seq_len=64)
    with raises_saying(DataError, "'mask_positions'", "train.data = @infilled()"):
        js.step.prepare(dataclasses.replace(plain, data=synthetic(256), model=TransformerConfig(vocab=512)))
    rows = dataclasses.replace(plain, data=infilled(synthetic(32)), objective=js.step.NextToken())
    with raises_saying(DataError, "'segment_ids'", "train.objective = @BlankInfilling()", "train.segments = False"):
        js.step.prepare(rows)
    js.step.prepare(dataclasses.replace(rows, segments=False))
    with raises_saying(DataError, "train.packing = 'stream'", "'fit'"):
        infilled(python_stdlib()).source(ByteTokenizer(), seq_len=64, split="train", packing="fit")
    with raises_saying(DataError, "train.seq_len = 6"):
        infilled(Texts()).source(None, seq_len=5, split="train")
    for setting, words in (({"short": 2}, "short = 2"), ({"rate": 1.0}, "rate = 1.0"), ({"mean": 0}, "mean = 0")):
        with raises_saying(DataError, words):
            infilled(Texts(), **setting)
    dense = infilled(synthetic(32), rate=0.9, mean=2)
    with raises_saying(DataError, "train.seq_len = 32"):
        dense.source(None, seq_len=20, split="train")
    assert dense.source(None, seq_len=32, split="train").seq_len == 32
    with raises_saying(DataError, "infilled.rate = 0.9", "below half of infilled.mean"):
        infilled(Texts(), rate=0.9, mean=1)
    with raises_saying(DataError, "must be a corpus"):
        infilled(3)
    with raises_saying(ConfigError, "which a window does not", "no windows"):
        dataclasses.replace(plain, model=TransformerConfig(windows=(4,)))
    with raises_saying(ConfigError, "which Mamba2 does not", "MultiHead()"):
        dataclasses.replace(plain, model=TransformerConfig(blocks=(BlockConfig(Mamba2()),)))
    model, ones = nnx.eval_shape(lambda: MODEL.make(nnx.Rngs(0))), np.ones((1, 8), np.int32)
    with raises_saying(ConfigError, "mask_positions need rows of one document", "leave out segment_ids"):
        model.hidden(ones, segment_ids=ones, mask_positions=ones)
    with raises_saying(ConfigError, "embed_gradient = 0", "at most 1"):
        TransformerConfig(embed_gradient=0)
