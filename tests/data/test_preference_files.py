"""Corpora of preferences: rows, splits, readers, and what is wrong with a line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxscale.data import ByteTokenizer, Loader, preference_files, rated_files
from jaxscale.errors import DataError
from tests.truth.errors import raises_saying

SEQ = 24
TOKENS = ByteTokenizer()
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }}{% else %}"
    "a:{% generation %}{{ m.content }}.{% endgeneration %}{% endif %}{% endfor %}"
)


def write(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"{folder}/*.jsonl"


def pairs(n):
    return [{"prompt": f"{i} + 1 = ", "chosen": f"{i + 1}", "rejected": f"{i + 2}!"} for i in range(n)]


def rated(n):
    return [{"prompt": f"{i} + 1 = ", "completion": f"{i + 1 + i % 3}", "label": i % 3 == 0} for i in range(n)]


def source(corpus, tmp_path, split="train", seq_len=SEQ):
    return corpus.source(TOKENS, seq_len=seq_len, split=split, cache=tmp_path / "cache")


def texts(batch, row):
    """The whole input, and the learned targets without eos."""
    n = int((batch["segment_ids"][row] > 0).sum())
    learned = batch["targets"][row, :n][batch["weights"][row, :n] > 0]
    assert learned[-1] == TOKENS.eos_id and not batch["weights"][row, n:].any()
    return TOKENS.decode(batch["tokens"][row, 1:n]), TOKENS.decode(learned[:-1])


def test_a_pair_is_two_rows_and_only_answers_have_weights(tmp_path):
    rows = source(preference_files(write(tmp_path / "a", pairs(9)), heldout=0.0), tmp_path)
    assert len(rows) == 18
    batch = rows.rows(np.arange(18))
    for i in range(9):
        assert texts(batch, 2 * i) == (f"{i} + 1 = {i + 1}", f"{i + 1}")
        assert texts(batch, 2 * i + 1) == (f"{i} + 1 = {i + 2}!", f"{i + 2}!")
    np.testing.assert_array_equal(batch["positions"][0, :10], np.arange(10))


def test_no_pair_is_divided_between_the_splits(tmp_path):
    glob = write(tmp_path / "a", pairs(40))
    seen = []
    for split in ("train", "heldout"):
        rows = source(preference_files(glob, heldout=0.3), tmp_path, split)
        batch = rows.rows(np.arange(len(rows)))
        prompts = [texts(batch, i)[0].split("=")[0] for i in range(len(rows))]
        assert prompts[::2] == prompts[1::2]
        seen += prompts[::2]
    assert sorted(seen) == sorted(line["prompt"].split("=")[0] for line in pairs(40))
    two = preference_files(write(tmp_path / "b", pairs(2)), heldout=0.01)
    assert [len(source(two, tmp_path, split)) for split in ("train", "heldout")] == [2, 2]


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_several_readers_read_the_same_batches(tmp_path, readers):
    for corpus, lines in ((preference_files, pairs(12)), (rated_files, rated(12))):
        rows = source(corpus(write(tmp_path / corpus.__name__, lines), heldout=0.0), tmp_path)
        loader = Loader(rows, 8, seed=3, group=2)
        whole = loader.batch_at(5)
        each = 8 // readers
        parts = [loader.batch_at(5, slice(i * each, (i + 1) * each)) for i in range(readers)]
        for key, x in whole.items():
            np.testing.assert_array_equal(x, np.concatenate([part[key] for part in parts]), err_msg=key)


def test_conversations_are_written_by_the_template(tmp_path):
    user, good, bad = (
        {"role": r, "content": c} for r, c in (("user", "2?"), ("assistant", "yes"), ("assistant", "no"))
    )
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    whole = [{"chosen": [user, good], "rejected": [user, bad]}, {"prompt": [user], "chosen": [good], "rejected": [bad]}]
    corpus = preference_files(write(tmp_path / "a", whole), template=str(tmp_path / "t.jinja"), heldout=0.0)
    batch = source(corpus, tmp_path).rows(np.arange(4))
    for key in ("tokens", "weights"):
        np.testing.assert_array_equal(batch[key][:2], batch[key][2:])  # both forms give the same rows
    learned = [TOKENS.decode(batch["targets"][i][batch["weights"][i] > 0]) for i in range(2)]
    assert learned == ["yes.", "no."]


def test_rated_answers_have_their_rating_and_the_answer_of_the_next(tmp_path):
    lines = rated(7)
    rows = source(rated_files(write(tmp_path / "a", lines), heldout=0.0), tmp_path)
    batch = rows.rows(np.arange(14))
    for i, line in enumerate(lines):
        other = lines[(i + 1) % 7]["completion"]
        assert texts(batch, 2 * i) == (line["prompt"] + line["completion"], line["completion"])
        assert texts(batch, 2 * i + 1) == (line["prompt"] + other, other)
        assert batch["desirable"][2 * i] == line["label"]


def test_what_is_too_long_is_refused_cut_or_dropped(tmp_path):
    lines = [*pairs(3), {"prompt": "p" * 10, "chosen": "c" * 30, "rejected": "r"}]
    glob = write(tmp_path / "a", lines)
    with raises_saying(DataError, "1 of 8 documents of 'preference_files'", "train.seq_len = 24", "has 41 tokens"):
        source(preference_files(glob, heldout=0.0), tmp_path)
    assert len(source(preference_files(glob, heldout=0.0), tmp_path, seq_len=41)) == 8  # the advice
    cut = source(preference_files(glob, too_long="cut", heldout=0.0), tmp_path)
    assert len(cut) == 8 and cut.rows(np.array([6]))["weights"].sum() == SEQ - 10
    dropped = source(preference_files(glob, too_long="drop", heldout=0.0), tmp_path)
    assert len(dropped) == 6 and texts(dropped.rows(np.arange(6)), 5)[1] == "4!"
    filled = write(tmp_path / "b", [*pairs(3), {"prompt": "p" * 30, "chosen": "c", "rejected": "r"}])
    with raises_saying(DataError, "2 documents", "prompts that fill train.seq_len = 24", "too_long = 'drop'"):
        source(preference_files(filled, too_long="cut", heldout=0.0), tmp_path)
    assert len(source(preference_files(filled, too_long="drop", heldout=0.0), tmp_path)) == 6
    with raises_saying(DataError, "too_long = 'skip' does not exist"):
        preference_files(glob, too_long="skip")


@pytest.mark.parametrize(
    "corpus,line,words",
    [
        (preference_files, {"prompt": "a", "chosn": "b", "rejected": "c"}, ("line 1", "no 'chosen'", "mean 'chosen'")),
        (preference_files, {"chosen": "b", "rejected": "c"}, ("needs a 'prompt'",)),
        (preference_files, {"prompt": "a", "chosen": "", "rejected": "c"}, ("'chosen' is empty",)),
        (preference_files, {"prompt": "a", "chosen": "c", "rejected": "c"}, ("are the same",)),
        (preference_files, {"prompt": "a", "chosen": ["c"], "rejected": "c"}, ("two texts, or two lists",)),
        (preference_files, {"prompt": "a", "chosen": 3, "rejected": "c"}, ("two texts, or two lists",)),
        (rated_files, {"prompt": "a", "completion": "b"}, ("no 'label'",)),
        (rated_files, {"prompt": "a", "completion": "b", "label": "good"}, ("'label' is 'good'", "true or false")),
    ],
)
def test_a_wrong_line_is_named(tmp_path, corpus, line, words):
    with raises_saying(DataError, "lines.jsonl", *words):
        source(corpus(write(tmp_path / "a", [line]), heldout=0.0), tmp_path)


def test_rows_that_do_not_belong_together_are_refused(tmp_path):
    from jaxscale.data import mixture, synthetic
    from jaxscale.step import DPO, KTO, TrainConfig

    sources = {
        "pairs": source(preference_files(write(tmp_path / "a", pairs(6)), heldout=0.0), tmp_path),
        "rated answers": source(rated_files(write(tmp_path / "b", rated(6)), heldout=0.0), tmp_path),
        "documents": synthetic(32, documents=20, length=40).source(None, seq_len=SEQ, split="train"),
    }
    for objective, right in ((DPO(), "pairs"), (KTO(), "rated answers")):
        for kind, rows in sources.items():
            if kind == right:
                objective.check_data(rows, TrainConfig())
                continue
            with raises_saying(DataError, f"needs rows that are {right}", f"are {kind}", "set train.data = @"):
                objective.check_data(rows, TrainConfig())
    parts = [(preference_files(write(tmp_path / n, pairs(9))), 1.0) for n in ("c", "d")]
    DPO().check_data(source(mixture(tuple(parts)), tmp_path), TrainConfig())
