"""Mistyped words of the kernels' command lines: the message suggests the word that was meant."""

from __future__ import annotations

import re

import pytest

from pallas_kernels import gate, tune
from tests.pallas_kernels import bounds, on_device

BEGINS = {gate: "why_no_tpu", tune: "attempts", bounds: "why_no_tpu", on_device: "check"}
"""A module with a command line -> the function that it calls after reading it."""


class Begun(Exception):
    """The command line was accepted, and the command's work would begin."""


@pytest.mark.parametrize(
    "module, words, wrong",
    [
        (gate, "sofmax --backend tpu", "sofmax"),
        (gate, "softmax --backend tpuu", "tpuu"),
        (gate, "softmax --bakend=tpu", "--bakend"),
        (tune, "sofmax --device h200", "sofmax"),
        (tune, "softmax --device h20", "h20"),
        (tune, "softmax --device h200 --where dtyp=bfloat16", "dtyp"),
        (tune, "softmax --device h200 --limt 1", "--limt"),
        (bounds, "--chek", "--chek"),
        (on_device, "--outt rows", "--outt"),
        (on_device, "--out rows --interpret mosaic_tpuu", "mosaic_tpuu"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_suggestion_for_a_mistyped_word_is_accepted(module, words, wrong, monkeypatch, capsys):
    def begin(*_, **__):
        raise Begun

    monkeypatch.setattr(module, BEGINS[module], begin)
    try:
        assert module.main(words.split()) == 2
    except SystemExit as e:
        assert e.code == 2
    message = capsys.readouterr().err
    assert wrong in message
    meant = re.search(r"did you mean '(.+)'\?", message)[1]
    with pytest.raises(Begun):
        module.main(words.replace(wrong, meant).split())
