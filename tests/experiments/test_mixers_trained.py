"""The rows that small mixers learn, judged token by token."""

from __future__ import annotations

import numpy as np

from experiments.mixers_trained.tasks import Pixels, Recall


def test_a_row_of_recall_asks_for_the_value_that_came_with_each_key() -> None:
    data = Recall(pairs=5, keys=7, values=3)
    for number in range(20):
        row, seen = data[number], {}
        for token, target, weight in zip(row["tokens"], row["targets"], row["weights"], strict=True):
            if token >= 3 + 7:
                key, value = divmod(int(token) - 3 - 7, 3)
                assert key not in seen and weight == 0
                seen[key] = value
            else:
                assert weight == 1 and 0 <= target == seen.pop(int(token) - 3)
        assert not seen and len(row["tokens"]) == 10
    assert not np.array_equal(data[0]["tokens"], data[1]["tokens"])
    assert np.array_equal(data[3]["tokens"], Recall(pairs=5, keys=7, values=3)[3]["tokens"])


def test_an_image_without_noise_is_its_shape_in_light_pixels() -> None:
    data, sizes = Pixels(noise=0.0), [set() for _ in range(4)]
    for number in range(60):
        row = data[number]
        light = row["tokens"].reshape(8, 8) >= 2
        (rows,), (columns,) = light.any(1).nonzero(), light.any(0).nonzero()
        size, count = np.ptp(rows) + 1, light.sum()
        assert size == np.ptp(columns) + 1 and row["weights"].sum() == row["weights"][-1] == 1
        shape = row["targets"][-1] - 4
        thick = 2 - size % 2
        crossed = 2 * thick * size - thick**2
        assert count == {0: size**2, 1: 4 * size - 4, 3: crossed}.get(shape, count)
        assert shape != 2 or 4 * size - 4 < count < size**2 or (size == 4 and count == 12)
        sizes[shape].add(size)
    assert all(len(of) > 2 for of in sizes)
    noisy = Pixels(noise=0.5)
    assert np.mean([noisy[i]["tokens"] >= 2 for i in range(20)]) > 0.4
