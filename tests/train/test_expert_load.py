"""`experts.jsonl`: loads of experts in a run's folder, its trackers and its report, and experts without tokens."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.nn.stats import TABLES
from jaxscale.step import LocalSteps, RobustGradients
from jaxscale.step.algorithms import Mean
from jaxscale.sweep.comparing import read_runs
from jaxscale.sweep.comparing.page import page
from jaxscale.train.expert_load import FILE, dead, draw_experts, every, line_of, numbers_of, read_experts
from jaxscale.train.metrics import json_row
from jaxscale.train.record import Record

LOADS = {1: [3, 1, 4, 0], 2: [2, 6, 0, 0], 3: [4, 4, 0, 0]}
"""The load of each expert of layer 1 by step; layer 0 has no experts."""


def _table(load, tokens=4, entropy=1.0):
    return {"experts_4": np.array([[0.0] * 6, [*load, tokens, entropy * tokens]], np.float32)}


@pytest.fixture
def folder(tmp_path):
    lines = [line_of(step, _table(load)) for step, load in LOADS.items()]
    (tmp_path / FILE).write_bytes(b"".join(map(json_row, lines)) + b"damaged\n")
    return tmp_path


def test_lines_have_the_layers_with_experts_and_are_read_again(folder):
    routing = read_experts(folder / FILE)
    assert {step: list(layers) for step, layers in routing.items()} == {1: [1], 2: [1], 3: [1]}
    at = routing[1][1]
    assert at.load == (3, 1, 4, 0) and at.entropy == 1.0 and at.max_load == 2.0 and at.idle == (3,)
    assert at.evenness == pytest.approx(1 / np.log(4))
    assert read_experts(folder / "none.jsonl") == {}
    assert every(20) == 1 and every(10_000) == 100


def test_an_entropy_that_is_not_finite_is_valid_json_and_read_again(folder):
    line = json_row(line_of(4, _table([4, 0, 0, 0], entropy=np.nan)))
    assert json.loads(line, parse_constant=pytest.fail)["layers"]["1"]["entropy"] == "nan"
    (folder / FILE).write_bytes(line)
    assert np.isnan(read_experts(folder / FILE)[4][1].entropy)


@pytest.mark.parametrize("algorithm", [LocalSteps(replicas=2, every=2), RobustGradients(replicas=2, aggregate=Mean())])
def test_replicas_add_up_their_loads_and_average_their_numbers(algorithm):
    one = {"loss": jnp.ones(2), TABLES: jax.tree.map(lambda a: jnp.stack([a, 0 * a]), _table([1, 0, 0, 1], tokens=1))}
    metrics = algorithm.over_replicas(one)
    assert metrics["loss"] == 1.0
    assert line_of(1, metrics[TABLES])["layers"]["1"] == {"load": [1, 0, 0, 1], "entropy": 1.0}


def test_dead_experts_have_no_token_in_the_last_tenth_of_the_lines(folder):
    assert dead(read_experts(folder / FILE)) == {1: (2, 3)}
    steps = {s: {0: read_experts(folder / FILE)[1 + (s == 19)][1]} for s in range(20)}
    assert dead(steps) == {0: (3,)}, "two lines of 20 count, and expert 2 has tokens in the first of them"


def test_trackers_get_numbers_of_each_layer_and_the_picture(folder):
    numbers = numbers_of(line_of(2, _table(LOADS[2], entropy=0.5)))
    assert numbers == {"moe/layer_1/max_load": 3.0, "moe/layer_1/router_entropy": 0.5, "moe/layer_1/idle_experts": 2.0}
    figure = draw_experts(read_experts(folder / FILE), "run", folder / "experts.png")
    (mesh,) = figure.axes[0].collections
    np.testing.assert_allclose(np.asarray(mesh.get_array()), np.array(list(LOADS.values())).T / 2)
    assert figure.axes[0].get_title() == "layer 1, dead: 2, 3"
    assert (folder / "experts.png").stat().st_size > 1000


def test_a_run_writes_its_loads_and_the_report_names_dead_experts(tmp_path):
    class Sent:
        rows: list = []

        def write(self, row):
            self.rows.append(row)

    class Folder:
        path, is_main = tmp_path, True

    record = Record.__new__(Record)
    record.run, record._trackers = Folder, Sent()
    for step, load in LOADS.items():
        record.experts(step, _table(load))
    assert [row["step"] for row in Sent.rows] == [1, 2, 3]
    (tmp_path / "metrics.jsonl").write_bytes(json_row({"step": 3, "loss": 1.0}))
    text = page(read_runs(tmp_path), "one run")
    assert "<h2>Experts</h2>" in text and "step 3" in text and ">2, 3</td>" in text
    assert "data:image/png;base64," in text
    (tmp_path / FILE).unlink()
    assert "<h2>Experts</h2>" not in page(read_runs(tmp_path), "one run")
