"""Packed rows against their documents, checked with plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from jaxscale.data.packing import Documents, best_fit, pack
from jaxscale.errors import DataError

EOS = 0


def documents(lengths, gap=3) -> Documents:
    """Document i has tokens i * 1000 + 1, 2, ... and an eos; `gap` foreign tokens (-1) lie between documents."""
    tokens, starts = [], []
    for i, length in enumerate(lengths):
        starts.append(len(tokens))
        tokens += [i * 1000 + k for k in range(1, length)] + [EOS] + [-1] * gap
    as64 = lambda values: np.array(values, np.int64)  # noqa: E731
    return Documents("made", "00", 10**6, EOS, np.array(tokens), as64(starts), as64(lengths))


def targets_of(lengths) -> list[int]:
    """Every token of `documents(lengths)`, in order."""
    return [t for i, length in enumerate(lengths) for t in [*range(i * 1000 + 1, i * 1000 + length), EOS]]


def random_lengths(seed, n=60, most=90):
    return np.random.default_rng(seed).integers(1, most, n).tolist()


def all_rows(source):
    return source.rows(np.arange(len(source)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("seq_len", [1, 7, 32, 500])
def test_stream_rows_are_windows_over_the_documents_end_to_end(seed, seq_len):
    lengths = random_lengths(seed)
    stream = [EOS, *targets_of(lengths)]
    segment = [i for i, length in enumerate(lengths) for _ in range(length)]
    source = pack(documents(lengths), "stream", seq_len)
    assert len(source) == len(segment) // seq_len
    batch = all_rows(source)
    assert np.all(batch["weights"] == 1)
    for r in range(len(source)):
        at = slice(r * seq_len, (r + 1) * seq_len)
        assert batch["tokens"][r].tolist() == stream[at]
        assert batch["targets"][r].tolist() == stream[at.start + 1 : at.stop + 1]
        own = np.array(segment[at])
        assert batch["segment_ids"][r].tolist() == (own - own[0] + 1).tolist()
        first = [segment[at].index(s) for s in segment[at]]
        assert batch["positions"][r].tolist() == [i - f for i, f in enumerate(first)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("packing", ["stream", "fit"])
def test_every_token_is_a_target_exactly_once_an_epoch(seed, packing):
    lengths = random_lengths(seed)
    batch = all_rows(pack(documents(lengths), packing, 24))
    expected = targets_of(lengths)
    if packing == "stream":  # loses the last partial row, and only that
        expected = expected[: len(expected) // 24 * 24]
    assert np.array_equal(np.sort(batch["targets"][batch["weights"] > 0]), np.sort(expected))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("packing", ["stream", "fit"])
def test_a_target_follows_its_token_and_the_first_of_a_document_follows_an_eos(seed, packing):
    batch = all_rows(pack(documents(random_lengths(seed)), packing, 24))
    tokens, targets = (batch[key][batch["weights"] > 0] for key in ("tokens", "targets"))
    inside = (tokens != EOS) & (targets != EOS)
    assert np.array_equal(targets[inside], tokens[inside] + 1)
    first = (tokens == EOS) & (targets != EOS)
    assert first.any() and np.all(targets[first] % 1000 == 1)
    assert np.all((tokens == EOS)[targets % 1000 == 1])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("packing", ["stream", "fit"])
def test_a_segment_opens_with_eos_at_position_0_and_segments_change_nowhere_else(seed, packing):
    batch = all_rows(pack(documents(random_lengths(seed)), packing, 64))
    used, eos = batch["weights"] > 0, batch["tokens"] == EOS
    assert np.all(batch["positions"][used & eos] == 0)
    change = np.diff(batch["segment_ids"], axis=1) != 0
    starts = used[:, 1:] & (batch["positions"][:, 1:] == 0)
    assert np.array_equal(change & used[:, 1:], starts)
    if packing == "stream":
        assert np.array_equal(eos[:, 1:], change)
    else:  # best fit may place the rest of a long document behind another
        rest = starts & ~eos[:, 1:]
        assert np.all(batch["tokens"][:, 1:][rest] % 1000 == 64)


def test_a_document_longer_than_a_row_goes_on_where_it_was_cut():
    batch = all_rows(pack(documents([7]), "fit", 3))
    assert batch["tokens"].tolist() == [[EOS, 1, 2], [3, 4, 5], [6, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2, 3], [4, 5, 6], [EOS, 0, 0]]
    assert batch["weights"].sum(1).tolist() == [3, 3, 1]


@pytest.mark.parametrize("seed", range(5))
def test_fit_never_splits_a_document_that_fits_a_row(seed):
    lengths = random_lengths(seed)
    batch = all_rows(pack(documents(lengths), "fit", 64))
    for i, length in enumerate(lengths):
        if 2 <= length <= 64:
            ((row, column),) = np.argwhere(batch["targets"] == i * 1000 + 1)
            at = slice(column, column + length)
            assert batch["tokens"][row, at].tolist() == [EOS, *range(i * 1000 + 1, i * 1000 + length)]
            assert batch["targets"][row, at].tolist() == [*range(i * 1000 + 1, i * 1000 + length), EOS]
            assert np.array_equal(batch["positions"][row, at], np.arange(length))
            assert len(set(batch["segment_ids"][row, at])) == 1


def test_fit_numbers_segments_from_one_and_leaves_padding_zero():
    batch = all_rows(pack(documents(random_lengths(0)), "fit", 64))
    padding = batch["weights"] == 0
    assert not any(batch[key][padding].any() for key in batch)
    for segments in batch["segment_ids"]:
        used = segments[segments > 0]
        assert np.array_equal(np.unique(used), np.arange(1, used.max() + 1))
        assert np.all(np.diff(used) >= 0) and np.all(segments[len(used) :] == 0)


def test_fit_wastes_little():
    batch = all_rows(pack(documents(random_lengths(1, n=800), gap=0), "fit", 128))
    assert batch["weights"].mean() > 0.97


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_matches_one_piece_at_a_time(seed):
    lengths = np.random.default_rng(seed).integers(1, 21, 70)
    free: list[int] = []
    for length in np.sort(lengths)[::-1]:
        fitting = [r for r in free if r >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else 20) - length)
    row, order = best_fit(lengths, 20)
    used = np.bincount(row, weights=lengths)
    assert sorted(20 - used) == sorted(free)
    assert np.all(np.diff(row[order]) >= 0) and sorted(order) == list(range(70))


def test_rows_do_not_depend_on_the_company_they_are_read_in():
    for packing in ("stream", "fit"):
        source = pack(documents(random_lengths(2)), packing, 24)
        together = source.rows(np.array([5, 0, 5, 3]))
        for i, row in enumerate([5, 0, 5, 3]):
            alone = source.rows(np.array([row]))
            assert all(np.array_equal(alone[key][0], together[key][i]) for key in alone)


@pytest.mark.parametrize(
    ("packing", "seq_len", "words"),
    [("streem", 8, "did you mean 'stream'"), ("fit", 0, "seq_len=0"), ("stream", 99, "at most 10")],
)
def test_an_impossible_packing_is_refused_in_one_sentence(packing, seq_len, words):
    with pytest.raises(DataError, match=words) as caught:
        pack(documents([4, 6]), packing, seq_len)
    assert "\n" not in str(caught.value)
