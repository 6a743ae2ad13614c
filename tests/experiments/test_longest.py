"""The search for the longest row that fits: it ends at the border, whatever the first guess, after few programs."""

from __future__ import annotations

import pytest

from experiments.long_context.longest import NEAR, at_most, following, length


def test_lengths_go_up_in_sixteenths_of_a_power_of_two() -> None:
    lengths = [length(i) for i in range(at_most(2**20), at_most(2**23))]
    assert all(1 < b / a <= 17 / 16 for a, b in zip(lengths, lengths[1:], strict=False))
    assert all(at_most(n) == at_most(n + 1) == i + at_most(2**20) for i, n in enumerate(lengths))
    assert all(n % 2**16 == 0 for n in lengths)  # so that 256 devices divide them in zigzag order, in tiles


@pytest.mark.parametrize("guess", (2**15, 2**20, 5_000_000, 2**25))
@pytest.mark.parametrize("border", (40_000, 1_500_000, 6_200_000))
@pytest.mark.parametrize("fails", (False, True))
def test_the_search_ends_at_the_border(guess: int, border: int, fails: bool) -> None:
    limit, fixed, sizes = 100 * 2**30, 30 * 2**30, {}
    while (place := following(sizes, limit, at_most(guess), fixed)) is not None:
        assert place not in sizes
        size = fixed + (limit - fixed) * length(place) // border + (2**30 if place % 2 else 0)
        sizes[place] = None if fails and size > limit else size
    fits = max(i for i, size in sizes.items() if size is not None and size <= limit)
    over = min(i for i, size in sizes.items() if size is None or size > limit)
    assert length(fits) <= border < length(over) <= 1.05 * NEAR * border
    assert len(sizes) <= (16 if fails else 4)


def test_the_search_ends_where_host_memory_does() -> None:
    sizes: dict[int, int | None] = {}
    while (place := following(sizes, 100, at_most(2**25), 0, at_most(2**23))) is not None:
        sizes[place] = length(place) * 100 // 2**26
    assert list(sizes) == [at_most(2**23)]
