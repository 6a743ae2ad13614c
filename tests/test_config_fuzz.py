"""No mistake in a config passes quietly, and none is a traceback: the short form of experiments/reliability/fuzz.py."""

from __future__ import annotations

import random

import pytest

from experiments.reliability.fuzz import FILES, Mutation, ask, chosen, pool

KINDS = {one.kind for file in FILES for one in pool(file, random.Random(0))}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_files_as_shipped_give_no_warning(file):
    assert ask(Mutation("none", file.name, file.read_text(), (), "none")).outcome == "silent"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_mistake_is_named(kind):
    verdicts = [(one, ask(one)) for one in chosen(40, seed=1) if one.kind == kind]
    assert verdicts
    assert not [f"{one.file}: {one.change}: {v.outcome}: {v.message}" for one, v in verdicts if not v.good]


def test_what_is_no_mistake_is_seen_as_silent():
    """A valid change is classified as silent, so an unnoticed mistake would be too."""
    text = FILES[0].read_text()
    assert not ask(Mutation("none", "", f"{text}\ntrain.seed = 3\n", ("seed",), "")).good
