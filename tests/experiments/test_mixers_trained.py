"""The rows that small mixers learn, judged token by token."""

from __future__ import annotations

import numpy as np

from experiments.mixers_trained.actions import Actions
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


def test_a_user_acts_on_few_groups_at_a_time_and_goes_on_where_a_group_was_left() -> None:
    data = Actions(groups=6, items=5, liked=2, turn=8, again=1.0, seq_len=24)
    shares = []
    for number in range(20):
        row = data[number]
        actions, last = np.append(row["tokens"], row["targets"][-1]).tolist(), dict[int, int]()
        assert row["tokens"][1:].tolist() == row["targets"][:-1].tolist() and row["weights"].all()
        for i, (group, item) in enumerate(divmod(action, 5) for action in actions):
            assert group < 6 and item == (last.get(group, item - 1) + 1) % 5
            last[group] = item
            if i % 8 == 0:
                assert len({a // 5 for a in actions[i : i + 8]}) <= 2
        shares.append(np.bincount(np.array(actions[:8]) // 5).max() / 8)
    assert np.ptp(shares) > 0.2  # users differ in how much they prefer a group
