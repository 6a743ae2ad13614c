"""BLEU under jit equals BLEU from counters, sentence by sentence, and sacreBLEU's where it is installed."""

from __future__ import annotations

import collections
import math

import jax
import numpy as np
import pytest

from jaxscale.errors import ConfigError
from jaxscale.rl import BleuReward, Sample, sentence_bleu


def grams(words, n):
    return collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def by_counters(hypothesis, references, order, smoothing):
    """Papineni et al. 2002, for one sentence."""
    logs, halves = 0.0, 1.0
    for n in range(1, order + 1):
        ours, most = grams(hypothesis, n), collections.Counter()
        for reference in references:
            most |= grams(reference, n)
        total, matches = sum(ours.values()), sum((ours & most).values())
        if total == 0 or (matches == 0 and smoothing == "none"):
            return 0.0
        if matches == 0:
            halves /= 2
            matches = halves
        logs += math.log(matches / total) / order
    nearest = min((abs(len(r) - len(hypothesis)), len(r)) for r in references)[1]
    return math.exp(logs + min(0.0, 1 - nearest / len(hypothesis)))


def sentences(count=40, vocab=5):
    random = np.random.default_rng(1)
    return [
        (random.integers(0, vocab, random.integers(1, 14)).tolist(),
         [random.integers(0, vocab, random.integers(1, 14)).tolist() for _ in range(random.integers(1, 4))])
        for _ in range(count)
    ]  # fmt: skip


def arrays(pairs, width=16):
    hypotheses, references = np.full((len(pairs), width), -1), np.full((len(pairs), 3, width), 0)
    lengths, sizes = np.zeros(len(pairs), np.int32), np.zeros((len(pairs), 3), np.int32)
    for i, (hypothesis, several) in enumerate(pairs):
        hypotheses[i, : len(hypothesis)], lengths[i] = hypothesis, len(hypothesis)
        for j, reference in enumerate(several):
            references[i, j, : len(reference)], sizes[i, j] = reference, len(reference)
    return hypotheses.astype(np.int32), lengths, references.astype(np.int32), sizes


@pytest.mark.parametrize(("order", "smoothing"), [(4, "exp"), (2, "none")])
def test_equals_bleu_from_counters(order, smoothing):
    pairs = sentences()
    jitted = jax.jit(sentence_bleu, static_argnames=("order", "smoothing"))
    ours = jitted(*arrays(pairs), order=order, smoothing=smoothing)
    np.testing.assert_allclose(ours, [by_counters(h, r, order, smoothing) for h, r in pairs], rtol=2e-5, atol=1e-7)


def test_equals_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    pairs = sentences(20)
    words = [(" ".join(map(str, h)), [" ".join(map(str, r)) for r in several]) for h, several in pairs]
    theirs = [
        sacrebleu.sentence_bleu(h, r, smooth_method="exp", tokenize="none", use_effective_order=False).score / 100
        for h, r in words
    ]
    np.testing.assert_allclose(sentence_bleu(*arrays(pairs)), theirs, rtol=2e-5, atol=1e-7)


def test_a_reward_of_texts_and_mistakes():
    def sample(text, answer):
        return Sample("", text, answer, (), (), (), "stop")

    texts = "a cat sat on the mat today"
    rewards = BleuReward()(
        [sample(texts, texts), sample("a dog ran off", [texts, "a dog ran away"]), sample("", texts)]
    )
    assert rewards[0] == pytest.approx(1) and 0 < rewards[1] < 1 and rewards[2] == 0
    with pytest.raises(ConfigError, match="use 1 or more, and 'none' or 'exp'"):
        sentence_bleu(*arrays(sentences(2)), smoothing="add")
