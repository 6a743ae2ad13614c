"""Scores of texts against float64 sums over the model's own logits, one window at a time."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, DataError, LayoutError
from jaxscale.infer import evaluate
from jaxscale.infer.choices import Question, multiple_choice, read_questions
from jaxscale.infer.evaluate import perplexity
from jaxscale.infer.loaded import check_length
from jaxscale.infer.score import windows
from jaxscale.step import describe_model
from tests.truth.errors import raises_saying
from tests.truth.long import short

LENGTH = 16


@pytest.fixture(scope="module")
def stored(finished_run):
    """The finished run, loaded as by another process."""
    return js.load(finished_run.path)


@pytest.fixture(scope="module")
def surprise(stored):
    """Nats of each target of one window, float64, from the logits of the window alone."""
    graphdef, _ = describe_model(stored.config.model)
    params = stored.params()
    logits = jax.jit(lambda ids: nnx.merge(graphdef, params)(ids))

    @functools.cache
    def of(ids):
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids) - 1] = ids[:-1]
        x = np.asarray(logits(row), np.float64)[0, : len(ids) - 1]
        return np.log(np.exp(x).sum(-1)) - x[np.arange(len(x)), list(ids[1:])]

    return of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    texts = ["def f(x):\n    return x + 1\n" * 2, "é", "a short one", "exactly16letters"]
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return [folder / f"{i}.txt" for i in range(len(texts))]


def _ids(text):
    return (0, *text.encode())


@pytest.mark.parametrize("stride", short(1, [16, 5]))
def test_perplexity_is_the_sum_over_windows_of_the_models_own_logits(stored, surprise, files, stride):
    nats, tokens, size, words = 0.0, 0, 0, 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        ids, done, begin = _ids(text), 0, 0
        while done < len(ids) - 1:
            window = ids[begin : begin + LENGTH + 1]
            nats += surprise(window)[done - begin :].sum()
            done, begin = begin + len(window) - 1, begin + stride
        tokens, size, words = tokens + len(ids) - 1, size + len(text.encode()), words + len(text.split())
    result = perplexity(stored, files, stride=stride, rows=3)
    assert (result.documents, result.tokens, result.bytes, result.words) == (4, tokens, size, words)
    np.testing.assert_allclose(result.nats, nats, rtol=1e-6)
    np.testing.assert_allclose(result.per_token, np.exp(nats / tokens), rtol=1e-5)
    np.testing.assert_allclose(result.bits_per_byte, nats / size / np.log(2), rtol=1e-6)
    np.testing.assert_allclose(np.log(result.per_word), nats / words, rtol=1e-6)


def test_held_out_documents_are_the_files_they_came_from(stored):
    source = stored.config.data.source(stored.config.tokenizer, seq_len=LENGTH, split="heldout")
    texts = list(stored.config.data.texts("heldout"))
    result = perplexity(stored)
    assert (result.documents, result.bytes) == (len(texts), sum(map(len, texts)))
    assert result.tokens == source.documents.lengths.sum() - len(texts)  # all but their ends
    folder = next(iter(stored.config.data.files()))[1].parent
    same = [p for p in sorted(folder.glob("*.txt")) if p.read_text() in texts]
    np.testing.assert_allclose(result.nats, perplexity(stored, same).nats, rtol=1e-6)


def test_of_prompts_and_completions_the_answers_count(stored, surprise, tmp_path):
    pairs = [("ab" * n, letter * n) for n in range(1, 5) for letter in "cdefg"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    corpus = js.data.chat_files(str(tmp_path / "*.jsonl"), heldout=0.5)
    run = js.Run(stored.path, dataclasses.replace(stored.config, data=corpus))
    heldout = corpus.source(stored.config.tokenizer, seq_len=LENGTH, split="heldout").documents
    spans = zip(heldout.starts, heldout.lengths, strict=True)
    texts = [bytes(heldout.tokens[i : i + n - 1].tolist()) for i, n in spans]
    expected = [(p, c) for p, c in pairs if f"{p}{c}".encode() in texts]
    assert 0 < len(expected) == len(texts) < len(pairs)
    result = perplexity(run)
    assert result.tokens == result.bytes == sum(len(c) + 1 for _, c in expected)
    nats = sum(surprise((0, *f"{p}{c}".encode(), 0))[len(p) :].sum() for p, c in expected)
    np.testing.assert_allclose(result.nats, nats, rtol=1e-6)


def test_rows_of_one_window_score_as_rows_of_many(stored, files):
    alone = js.Run(stored.path, dataclasses.replace(stored.config, segments=False))
    np.testing.assert_allclose(perplexity(alone, files).nats, perplexity(stored, files).nats, rtol=1e-6)


@pytest.mark.parametrize("mesh", ["data=2,tensor=2,context=2", "fsdp=8"])
def test_a_layout_changes_no_score(stored, files, mesh):
    result = perplexity(stored, files, layout=js.Layout(mesh), stride=8, rows=2)
    np.testing.assert_allclose(result.nats, perplexity(stored, files, stride=8).nats, rtol=1e-6)


def test_every_target_counts_in_one_window():
    random = np.random.default_rng(0)
    for _ in range(200):
        n, length = random.integers(1, 50), random.integers(1, 20)
        first, stride = random.integers(0, n), random.integers(1, length + 1)
        result = windows([n], [first], length, stride)
        assert [t for w in result for t in range(w.counted, w.end)] == list(range(first, n))
        assert all(w.begin <= w.counted and w.end - w.begin <= length for w in result)
        if first == 0:
            assert all(w.counted - w.begin >= length - stride for w in result[1:])


# --- questions --------------------------------------------------------------------------------------------------------

QUESTIONS = [
    Question("def f1_2(x):", ("return x + 2", "xyz", "é"), 0),
    Question("", ("def", "fed"), 1),
    Question("a question that is longer than sixteen tokens:", ("yes", "no", "return"), 2),
    Question("x", ("+ 1", "+ 11"), 0),
]


def test_choices_score_as_the_models_own_logits_say(stored, surprise):
    result = multiple_choice(stored, QUESTIONS, rows=3)
    for q, nats in zip(QUESTIONS, result.nats, strict=True):
        for choice, value in zip(q.choices, nats, strict=True):
            n = len(f" {choice}".encode())
            want = surprise(_ids(f"{q.context} {choice}")[-LENGTH - 1 :])[-n:].sum()
            np.testing.assert_allclose(value, want, rtol=1e-5)
    long = sum(len(f"{q.context} {c}".encode()) > LENGTH for q in QUESTIONS for c in q.choices)
    right = [int(np.argmin(n)) == q.answer for q, n in zip(QUESTIONS, result.nats, strict=True)]
    over = [
        [v / len(c) for v, c in zip(n, q.choices, strict=True)] for q, n in zip(QUESTIONS, result.nats, strict=True)
    ]
    normalised = [int(np.argmin(n)) == q.answer for q, n in zip(QUESTIONS, over, strict=True)]
    assert (list(result.right), list(result.right_normalised), result.cut) == (right, normalised, long)
    share, error = result.accuracy
    np.testing.assert_allclose([share, error], [np.mean(right), np.std(right, ddof=1) / math.sqrt(4)])


def test_a_choice_is_what_the_context_alone_does_not_have(stored, surprise):
    """Merges across the boundary belong to the choice."""

    class Pairs:
        """Two letters a token where they stand at even places."""

        vocab_size, eos_id, name, fingerprint = 256, 0, "pairs", "pairs"

        def encode(self, text):
            pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
            return np.array([1 + sum(p.encode()) % 250 for p in pairs], np.int32)

        def decode(self, ids):
            raise AssertionError("nobody asks")

    run = js.Run(stored.path, dataclasses.replace(stored.config, tokenizer=Pairs()))
    result = multiple_choice(run, [Question("abc", ("d", "x"), 0)], separator="")
    ids = (0, *Pairs().encode("abcd").tolist())
    np.testing.assert_allclose(result.nats[0][0], surprise(ids)[1:].sum(), rtol=1e-5)


def test_questions_are_read_from_lines(tmp_path):
    file = tmp_path / "quiz.jsonl"
    rows = [
        {"question": "a?", "choices": ["b", "c"], "answer": 1},
        {"context": "", "choices": ["b", "c"], "answer": "b", "more": 3},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_questions(file) == [Question("a?", ("b", "c"), 1), Question("", ("b", "c"), 0)]


@pytest.mark.parametrize(
    "line, words",
    [
        ("no json", ["line 1", "not JSON"]),
        ("[]", ["line 1", "not a JSON object"]),
        ('{"qestion": "a", "choices": ["b", "c"], "answer": 0}', ["no field 'question'", "did you mean 'qestion'"]),
        ('{"question": "a", "choices": ["b"], "answer": 0}', ["1 choice(s)", "at least two"]),
        ('{"question": "a", "choices": ["b", ""], "answer": 0}', ["not empty"]),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', ["answer 2", "from 0"]),
        ('{"question": "a", "choices": ["b", "c"], "answer": "d"}', ["answer 'd'"]),
        ("", ["no question"]),
    ],
)
def test_a_wrong_question_is_named_by_its_line(tmp_path, line, words):
    (tmp_path / "quiz.jsonl").write_text(line)
    with raises_saying(DataError, "quiz.jsonl", *words):
        read_questions(tmp_path / "quiz.jsonl")


@pytest.mark.parametrize(
    "options, words",
    [({"length": 0}, ["length = 0"]), ({"stride": 17}, ["stride = 17", "at most 16"]), ({"rows": 0}, ["rows = 0"])],
)
def test_a_wrong_window_is_an_error(stored, files, options, words):
    with raises_saying(ConfigError, *words):
        perplexity(stored, files, **options)


def test_the_advised_length_divides_over_a_ring_in_zigzag_order():
    model = js.models.TransformerConfig(
        depth=1, vocab=64, width=32, heads=4, hidden=64, attention=js.nn.RingAttention()
    )
    run, layout = SimpleNamespace(config=js.TrainConfig(model=model)), js.Layout("context=4").abstract(8)
    for length in (58, 60):  # neither, and what the mesh alone would allow
        with raises_saying(LayoutError, f"length = {length}", "multiple of 8", "56 or 64"):
            check_length(run, layout, length)
    for length in (56, 64):
        check_length(run, layout, length)
    check_length(run, None, 58)


def test_texts_that_cannot_be_scored_are_an_error(stored, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with raises_saying(DataError, "no text to evaluate"):
        perplexity(stored, [tmp_path / "empty.txt"])
    with raises_saying(DataError, "cannot read", "gone.txt"):
        perplexity(stored, [tmp_path / "gone.txt"])


def test_a_line_of_json_is_scored_by_its_text(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "scored_ids", lambda run, text: text)
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "one two", "id": 7}\n\n{"text": "three"}\n')
    documents = [(d.ids, d.bytes, d.words) for d in evaluate._documents(None, [file])]
    assert documents == [("one two", 7, 2), ("three", 5, 1)]
    for line, words in (('{"question": "?"}', "(question)"), ("[1]", "(list)"), ("{", "is not JSON")):
        file.write_text('{"text": "a"}\n' + line)
        with raises_saying(DataError, "some.jsonl, line 2", words):
            list(evaluate._documents(None, [file]))
