"""NDCG@10 of a rule without training: groups by their counts in a user's last actions, and of each its next item.

python experiments/recommendation/counted.py
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from experiments.recommendation.actions import Actions

USERS, LAST = 256, 16


def gains(data: Actions, number: int, last: int = LAST) -> list[float]:
    """Return the gain of every prediction of a user: 1 / log2(1 + rank) of the true item, 0 where it has no rank."""
    row, gained = data[number], []
    tokens = row["tokens"].tolist()
    for i, target in enumerate(row["targets"].tolist()):
        items = {token // data.items: token % data.items for token in tokens[: i + 1]}  # the last of each group
        counts = Counter(token // data.items for token in reversed(tokens[max(0, i + 1 - last) : i + 1]))
        ranked = [g * data.items + (items[g] + 1) % data.items for g, _ in counts.most_common(10)]  # ties: latest first
        gained.append(float(1 / np.log2(2 + ranked.index(target))) if target in ranked else 0.0)
    return gained


def main() -> None:
    """Print the mean over users that no model was trained on."""
    data = Actions(seed=1)
    print(f"NDCG@10 {np.mean([gains(data, number) for number in range(USERS)]):.3f}")


if __name__ == "__main__":
    main()
