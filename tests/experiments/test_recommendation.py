"""The users that recommendation is measured on, and the collection of a sweep's scores."""

from __future__ import annotations

import numpy as np

from experiments.of_sweep import collected
from experiments.recommendation.actions import Actions
from experiments.recommendation.counted import gains


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


def test_scores_of_a_sweep_are_together_by_setting_and_an_unfinished_run_has_none(tmp_path) -> None:
    (tmp_path / "results.csv").write_text(
        "train.lr,train.seed,state,steps,parameters,flops,eval_loss\n"
        "0.1,1,finished,5,10,2e3,1.5\n0.2,0,failed,3,,,\n0.1,0,finished,5,10,2e3,1.25\n"
    )
    first, second = collected(tmp_path, ("eval_loss",))
    assert (first["train.lr"], first["parameters"], first["flops"]) == ("0.1", 10, 2000.0)
    assert [(run["seed"], run["eval_loss"]) for run in first["runs"]] == [(0, 1.25), (1, 1.5)]
    assert second == {"train.lr": "0.2", "runs": [{"seed": 0, "steps": 3, "state": "failed"}]}


def test_a_rule_that_counts_ranks_the_groups_by_their_last_actions() -> None:
    data = Actions(groups=4, items=5, liked=1, turn=64, again=1.0, seq_len=12)
    assert gains(data, 0) == [1.0] * 12  # one group, and the item after the last one
    random = Actions(groups=4, items=5, liked=4, turn=64, again=0.0, seq_len=12)
    assert 0 < np.mean([gains(random, number) for number in range(20)]) < 0.5
