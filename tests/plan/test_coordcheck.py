"""The coordinate check: what it records, what counts as flat, and that only µP is flat."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxscale.cli import main
from jaxscale.errors import ConfigError
from jaxscale.models import TransformerConfig
from jaxscale.nn import GELU
from jaxscale.plan.activations import recorded
from jaxscale.plan.coordcheck import CoordCheck, Coordinate, _slope, _steepest, coordcheck
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import describe_model
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.params import random_params

pytestmark = pytest.mark.once

GIN = """\
train.model = @Transformer()
Transformer.depth = 1
Transformer.width = 16
Transformer.head_dim = 8
Transformer.hidden = 32
Transformer.mlp = @GELU
train.data = @text_files()
text_files.glob = '{folder}/*.txt'
text_files.heldout = 0.2
train.batch_size = 4
train.seq_len = 16
train.lr = 1e-3
train.clip_norm = None
"""
"""A tiny model, with a learning rate that is small enough for changes to be proportional to it."""
PARAMETRISATIONS = {"standard": ("", 1), "MuP": ("Transformer.parametrisation = @MuP()\nMuP.base_width = 16\n", 0)}


def test_records_the_output_of_each_module_of_each_layer():
    config = TransformerConfig(depth=2, vocab=32, width=16, heads=4, kv_heads=2, hidden=24, mlp=GELU, scan=True)
    graphdef, infos = describe_model(config)
    tokens = jnp.arange(12).reshape(2, 6)

    def both(params):
        forward = lambda params: nnx.merge(graphdef, params).hidden(tokens)  # noqa: E731
        return recorded(forward, params, keep=lambda shape: shape[:2] == tokens.shape and len(shape) > 2), forward(
            params
        )

    (out, activations), want = jax.jit(both)(random_params(infos))
    assert_leaves_agree(out, want)
    assert_leaves_agree(activations["norm"], want)
    block = "runs/0/blocks/0"
    assert activations[block].shape == (2, 2, 6, 16)  # layers first
    # the residual stream is the sum of recorded activations
    into = np.stack([activations["embed"], activations[block][0]])
    assert_leaves_agree(into + activations[f"{block}/attn"] + activations[f"{block}/mlp"], activations[block])
    q, k, v = (np.float64(x) for x in activations[f"{block}/attn/qkv:qkv"])
    scores = np.einsum("lbshd,lbthd->lbhst", q, np.repeat(k, 2, -2)) / 2  # a head's width is 4
    scores = np.where(np.tril(np.ones((6, 6))), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    assert_leaves_agree(activations[f"{block}/attn/mix"], np.einsum("lbhst,lbthd->lbshd", weights, np.repeat(v, 2, -2)))


def test_slopes_are_those_of_least_squares():
    widths, sizes = (32, 64, 256), np.array([0.3, 0.7, 0.9])
    assert _slope(widths, sizes) == pytest.approx(np.polyfit(np.log(widths), np.log(sizes), 1)[0])
    assert _slope(widths, np.zeros(3)) == 0


PLANTED = {
    "flat": ("norm", 0.1, -0.1, None),
    "growing at the start": ("norm", 0.2, 0.0, "is more, the wider"),
    "moved more": ("runs/0/blocks/0/scores", 0.0, 0.2, "is moved more, the wider"),
    "moved less": ("norm", 0.0, -0.2, "is moved less, the wider"),
    "logits may shrink": ("logits", -0.5, -0.5, None),
}


@pytest.mark.parametrize("case", PLANTED)
def test_what_is_flat(case):
    name, init, moved, words = PLANTED[case]
    reason = Coordinate(name, (1.0,), ((1.0,),), init, moved).why_not_flat(0.15)
    assert words in reason if words else reason is None


@pytest.mark.parametrize("widths", [(16, 32), (16, 32, 64)])
def test_the_table_states_its_rule_and_that_two_widths_are_noisy(widths, capsys):
    check = CoordCheck("MuP()", widths, 1, 1, 0.15, (Coordinate("norm", widths, (widths,), 0.0, 0.0),), ((1.0,),))
    Console(width=120).print(check)
    output = capsys.readouterr().out
    assert "flat: no slope in log width beyond ±0.15; logits and scores may shrink" in output
    assert ("is noisy" in output) == (len(widths) < 3)
    assert any(line.split()[-1] == "flat" for line in output.splitlines() if "slope" in line and "width" not in line)


def test_numbers_that_are_not_finite_are_not_flat():
    assert "not finite" in Coordinate("norm", (1.0,), ((np.nan,),), 0.0, np.nan).why_not_flat(0.15)


def test_a_module_that_moves_at_some_widths_alone_is_not_flat():
    moved = np.array([0.0, 1.0])
    slope = _steepest("norm", [0.1, _slope((16, 32), moved)])
    assert "some widths" in Coordinate("norm", (1.0, 1.0), (tuple(moved),), 0.0, slope).why_not_flat(0.15)


@pytest.mark.parametrize("name, slope", [("norm", -0.4), ("logits", 0.3)])
def test_a_step_where_logits_shrink_does_not_hide_one_where_they_grow(name, slope):
    assert _steepest(name, [-0.4, 0.3, 0.0]) == slope


@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_the_command_passes_mup_and_fails_the_standard_one(name, tmp_path, capfd):
    bindings, want = PARAMETRISATIONS[name]
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("".join(f"{n} times {i} is {n * i}\n" for n in range(300)))
    (tmp_path / "small.gin").write_text(GIN.format(folder=tmp_path) + bindings)
    options = "--widths 16,64 --steps 2 --seeds 3 --json --out".split()
    code = main(["coordcheck", str(tmp_path / "small.gin"), *options, str(tmp_path / "out")])
    result = json.loads(capfd.readouterr().out)
    assert code == want, result["failures"]
    assert (result["flat"], result["widths"]) == (want == 0, [16, 64])
    assert json.loads((tmp_path / "out/coordcheck.json").read_text()) == result
    assert (tmp_path / "out/coordcheck.png").read_bytes().startswith(b"\x89PNG")


REFUSED = {
    "one width": (dict(widths=[32]), "a slope needs two widths"),
    "no step": (dict(steps=0), "steps = 0: must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_raise_before_anything_runs(case):
    arguments, words = REFUSED[case]
    with raises_saying(ConfigError, words):
        coordcheck(TrainConfig(), **arguments)
