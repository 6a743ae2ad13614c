"""The rows that small mixers learn, judged token by token."""

from __future__ import annotations

import numpy as np

from experiments.mixers_trained.tasks import Recall


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
