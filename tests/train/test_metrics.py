"""metrics.jsonl: a line a step with these keys, and readable whatever happened to the writer."""

from __future__ import annotations

import json
import math
import time

import pytest

import jaxscale as js
from jaxscale.errors import RunError
from jaxscale.step.rates import peak_flops
from jaxscale.train.goodput import COLUMNS
from jaxscale.train.metrics import MetricsFile, read_metrics
from tests.truth.errors import raises_saying
from tests.truth.runs import STEPS, bigram

KEYS = {"step", "loss", "grad_norm", "lr", "tokens_per_second", "model_flops_per_second", "host_seconds", "time"}


def fit(**changes):
    return js.fit(js.TrainConfig(**bigram(**changes)), quiet=True)


def test_every_step_has_a_line(finished_run):
    lines = (finished_run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_every_line_has_these_numbers(finished_run):
    assert [row.keys() - {"eval_loss", *COLUMNS} for row in finished_run.metrics()] == [KEYS] * STEPS


def test_every_number_is_finite(finished_run):
    assert all(math.isfinite(x) for row in finished_run.metrics() for x in row.values())


def test_times_go_forward(finished_run):
    times = [row["time"] for row in finished_run.metrics()]
    assert times == sorted(times) and times[-1] <= time.time()


@pytest.mark.parametrize("every, steps", [(0, [5]), (2, [2, 4, 5])])
def test_held_out_loss_is_written_when_it_was_asked_for(every, steps):
    rows = fit(steps=5, eval_every=every, eval_batches=1).metrics()
    assert [row["step"] for row in rows if "eval_loss" in row] == steps


def test_nothing_is_held_out_without_batches_for_it():
    assert all("eval_loss" not in row for row in fit(eval_every=1, eval_batches=0).metrics())


def test_the_first_loss_of_an_unlearned_model_is_that_of_guessing(finished_run):
    assert finished_run.metrics()[0]["loss"] == pytest.approx(math.log(256), abs=1)


def test_the_gradient_norm_is_from_before_clipping():
    assert fit(clip_norm=1e-6, steps=1).metrics()[0]["grad_norm"] > 1e-3


def test_a_torn_line_stays_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    file = MetricsFile(path)
    file.write({"step": 2, "loss": 1.5})
    file.close()
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]


def test_a_torn_last_line_survives_a_resume():
    run = js.fit(js.TrainConfig(**bigram(steps=2)), run="here", quiet=True)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 3.')
    resumed = js.fit(js.TrainConfig(**bigram(steps=4)), run="here", resume=True, quiet=True)
    assert [row["step"] for row in resumed.metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize("line", [b"", b"12", b"[1]", b"null", b'{"loss": 1}', b'{"step": null}', b"\xff\xfe"])
def test_a_line_that_is_no_step_is_passed_over(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + line + b'\n{"step": 2, "loss": 1.0}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_the_last_line_of_a_step_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 9}\n{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n')
    assert [row["loss"] for row in read_metrics(path)] == [3, 2]


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_has_not_come_back(tmp_path, number):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": number})
    file.close()
    assert repr(read_metrics(tmp_path / "metrics.jsonl")[0]["loss"]) == repr(number)


def test_lines_are_strict_json(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": math.nan})
    file.close()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_line_is_there_before_the_file_is_closed(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
    file.close()


def test_a_full_disk_is_said(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file._file = open("/dev/full", "wb")  # noqa: SIM115
    with raises_saying(RunError, "cannot write", "No space left"):
        file.write({"step": 1})
    with pytest.raises(OSError):
        file.close()


def test_a_run_without_metrics_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    "kind, peak", [("NVIDIA H200", 989e12), ("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("cpu", None)]
)
def test_peaks_are_found_by_the_kind_of_device(kind, peak):
    class Device:
        device_kind = kind

    assert peak_flops(Device()) == peak


def test_a_resume_replaces_what_was_written_after_it(tmp_path):
    file = tmp_path / "metrics.jsonl"
    steps = [1, 2, 3, 4, 3]  # killed at 4, resumed from 2, stopped at 3
    file.write_text("".join(f'{{"step": {s}, "loss": {i}}}\n' for i, s in enumerate(steps)))
    assert [(r["step"], r["loss"]) for r in read_metrics(file)] == [(1, 0), (2, 1), (3, 4)]
