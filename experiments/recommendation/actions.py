"""A stream of users' actions in which the groups that a user acted on often come back: for recommendation."""

from __future__ import annotations

import dataclasses

import numpy as np

from experiments.mixers_trained.tasks import Row
from jaxscale.config import register


@register
@dataclasses.dataclass(frozen=True)
class Actions:
    """Actions of users on items: how often a group of items came says how likely the next item is of that group.

    A user has an intensity for each of a few groups (Dirichlet), and draws the group of each action by it. The item is
    mostly the one after the user's last item of that group, and any item of the group otherwise. After every `turn`
    actions the user has other groups and intensities.

    Token ids: the items, group by group.

    Args:
      groups: groups of items.
      items: items of a group.
      liked: groups that a user acts on at a time.
      turn: actions until a user's groups change.
      again: probability of the item after the last one; else any item of the group.
      seq_len: actions of a row.
      rows: number of users, training and held-out ones together.
      seed: of the rows.
    """

    groups: int = 16
    items: int = 8
    liked: int = 4
    turn: int = 32
    again: float = 0.8
    seq_len: int = 64
    rows: int = 20000
    seed: int = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Row:
        rng = np.random.default_rng((self.seed, number))
        turns = self.seq_len // self.turn + 1
        liked = [rng.permutation(self.groups)[: self.liked] for _ in range(turns)]
        intensity = rng.dirichlet(np.ones(self.liked), size=turns)
        last = rng.integers(self.items, size=self.groups).tolist()
        repeats, items = rng.random(self.seq_len + 1) < self.again, rng.integers(self.items, size=self.seq_len + 1)
        below = np.repeat(np.cumsum(intensity, axis=1), self.turn, axis=0)[: self.seq_len + 1, :-1]
        chosen = np.sum(rng.random((self.seq_len + 1, 1)) >= below, axis=1)
        actions = np.zeros(self.seq_len + 1, np.int32)
        for i, (choice, repeat, item) in enumerate(zip(chosen, repeats, items, strict=True)):
            group = liked[i // self.turn][choice]
            last[group] = (last[group] + 1) % self.items if repeat else item
            actions[i] = group * self.items + last[group]
        return {"tokens": actions[:-1], "targets": actions[1:], "weights": np.ones(self.seq_len, np.float32)}
