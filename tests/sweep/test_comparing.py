"""Comparing runs: reading whole and damaged folders, tables and the report's page."""

from __future__ import annotations

import builtins
import fcntl
import html.parser
import json
from pathlib import Path

import numpy as np
import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import ConfigError, RunError
from jaxscale.sweep.comparing import read_runs
from jaxscale.sweep.comparing.differences import curves_of, differing, groups_of, shared
from jaxscale.sweep.comparing.folders import read_bindings
from jaxscale.sweep.comparing.page import page
from jaxscale.sweep.comparing.pictures import _heights
from jaxscale.sweep.comparing.report import report
from jaxscale.train.metrics import json_row
from jaxscale.train.record import Record
from tests.truth.errors import raises_saying

CONFIG = """\
train.batch_size = 8
train.lr = {lr}
train.model = @model/Transformer()
train.optimizer = @optimizer/{optimizer}()
train.seed = {seed}
train.seq_len = 16
model/Transformer.depth = {depth}
optimizer/{optimizer}.b1 = 0.9
"""
EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>{{script}}"


def write_run(
    path: Path, losses=(3.0, 2.0, 1.0), evals=None, lr=1e-3, seed=0, depth=2, optimizer="AdamW", sample=None, **info
) -> Path:
    """Write a run folder as `fit` does, without training."""
    path.mkdir(parents=True)
    (path / "config.gin").write_text(CONFIG.format(lr=lr, seed=seed, depth=depth, optimizer=optimizer))
    about = {
        "status": "finished",
        "started": "2026-01-02T03:04:05+0000",
        "updated": "2026-01-02T03:06:10+0000",
        "hardware": {"device": "cpu", "devices": 1, "processes": 1, "cores": 2, "host": "x86_64"},
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
        "parameters": 100,
    }
    (path / "run.json").write_text(json.dumps(about | info))
    rows = [{"step": i + 1, "loss": float(x), "tokens_per_second": 1280.0} for i, x in enumerate(losses)]
    for step, value in (evals or {}).items():
        rows[step - 1]["eval_loss"] = float(value)
    (path / "metrics.jsonl").write_bytes(b"".join(map(json_row, rows)))
    if sample is not None:
        (path / "samples.jsonl").write_text(json.dumps({"step": 3, "prompt": "def ", "text": sample}) + "\n")
    return path


def write_sweep(path: Path, depths=(2, 4), seeds=3) -> Path:
    """Write a sweep's folder with a journal and a run per trial, one of them failed."""
    lines, count = [], 0
    for depth in depths:
        for seed in range(seeds):
            losses = [4 - 0.1 * depth + 0.01 * seed - 0.02 * i for i in range(40)]
            write_run(path / f"{count:03}", losses, {20: losses[19], 40: losses[39]}, depth=depth, seed=seed)
            bindings = {"Transformer.depth": str(depth), "train.seed": str(seed)}
            lines.append({"id": count, "bindings": bindings, "until": None})
            outcome = {"state": "finished", "steps": 40, "seconds": 12.5, "error": None}
            (path / f"{count:03}" / "outcome.json").write_text(json.dumps(outcome))
            count += 1
    (path / f"{count:03}").mkdir()
    lines.append({"id": count, "bindings": {"Transformer.depth": "3", "train.seed": "0"}, "until": None})
    failed = {"state": "failed", "steps": 0, "seconds": 0.5, "error": "width = 16 is not divisible by heads = 3"}
    (path / f"{count:03}" / "outcome.json").write_text(json.dumps(failed))
    (path / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": 9, "bi')
    return path


class Page(html.parser.HTMLParser):
    """A parsed page: its elements, scripts and text."""

    def __init__(self, *runs: str | Path):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text, self.scripts = "", []
        self.inside = ""
        self.feed(page(read_runs(runs), "A page"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_run_is_a_row_with_its_bindings_and_its_numbers(finished_run):
    pytest.importorskip("pandas")
    row = js.runs(finished_run.path).iloc[0]
    config, rows = finished_run.config, finished_run.metrics()
    assert (row["train.lr"], row["train.seq_len"], row["seed"]) == (config.lr, config.seq_len, config.seed)
    assert row["model/Transformer.width"] == config.model.width and row["state"] == "finished"
    assert row["loss"] == rows[-1]["loss"] and row["eval_loss"] == rows[-1]["eval_loss"]
    assert row["best_loss"] == min(r["loss"] for r in rows)
    assert row["tokens_per_second"] == np.median([r["tokens_per_second"] for r in rows[1:]])
    assert row["tokens"] == config.steps * config.batch_size * config.seq_len
    assert row["flops"] == config.steps * config.model.flops(config.batch_size, config.seq_len)
    assert (row["parameters"], row["jax"]) == (config.model.param_count(), finished_run.info["versions"]["jax"])


def test_a_pattern_is_a_row_for_each_run_and_leaves_other_folders_alone(tmp_path):
    pytest.importorskip("pandas")
    for seed in range(3):
        write_run(tmp_path / f"lr-{seed}", seed=seed)
    (tmp_path / "lr-notes").mkdir()
    assert list(js.runs(str(tmp_path / "lr-*"))["train.seed"]) == [0, 1, 2]


def test_a_sweep_is_its_runs_with_its_axes_by_their_names(tmp_path):
    pytest.importorskip("pandas")
    table = js.runs(write_sweep(tmp_path / "sweep"))
    assert list(table["Transformer.depth"]) == [2, 2, 2, 4, 4, 4, 3]
    assert list(table["state"]) == ["finished"] * 6 + ["failed"] and table["seconds"][0] == 12.5
    assert table["error"].iloc[-1] == "width = 16 is not divisible by heads = 3"


def test_an_axis_of_several_bindings_is_a_column_each(tmp_path):
    write_run(tmp_path / "000")
    bindings = {"train.lr, train.optimizer": "(0.001, @big/Lion())", "train.prompt, train.seed": "('a @b', 1)"}
    line = {"id": 0, "bindings": bindings | {"train.schedule": "@Constant()"}}
    (tmp_path / "trials.jsonl").write_text(json.dumps(line))
    assert read_runs(tmp_path)[0].axes == {
        "train.lr": 0.001,
        "train.optimizer": "@big/Lion()",
        "train.prompt": "a @b",
        "train.seed": 1,
        "train.schedule": "@Constant()",
    }


def test_curves_are_a_row_for_each_number(tmp_path):
    pytest.importorskip("pandas")
    write_run(tmp_path / "a", [3, 2, 1], {3: 1.5})
    table = js.curves(tmp_path / "a")
    assert list(table[table.metric == "loss"].value) == [3, 2, 1]
    assert table[table.metric == "eval_loss"][["step", "value"]].values.tolist() == [[3, 1.5]]
    assert set(js.curves(tmp_path / "a", "loss").metric) == {"loss"}
    with raises_saying(ConfigError, "no run has a metric 'evalloss'; did you mean 'eval_loss'"):
        js.curves(tmp_path / "a", ["loss", "evalloss"])


@pytest.mark.parametrize("lost", ["run.json", "config.gin", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "torn", "not text"])
def test_a_damaged_run_is_still_a_row(tmp_path, lost, damage):
    file = write_run(tmp_path / "a") / lost
    torn = file.read_bytes()[:20]
    file.unlink()
    if damage != "missing":
        file.write_bytes(torn if damage == "torn" else b"\xff\x00\xfe[1, 2")
    (run,) = read_runs(tmp_path / "a")
    assert run.steps == (0 if lost == "metrics.jsonl" else 3)
    assert bool(run.problems) == (lost == "run.json" or lost == "config.gin" and damage != "torn")
    assert Page(tmp_path / "a").data


def test_a_running_run_without_a_lock_was_interrupted(tmp_path):
    path = write_run(tmp_path / "a", status="running")
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_runs(path)[0].state == "running"
    assert read_runs(path)[0].state == "interrupted"


def test_bindings_are_read_without_building_anything(finished_run):
    text = (
        finished_run.path / "config.gin"
    ).read_text() + "# train.guards = (<object>,): not expressible in gin; pass it "
    values = read_bindings(text + "again from Python\n")
    assert values["train.lr"] == finished_run.config.lr and values["train.model"] == "@model/Transformer()"
    assert values["train.prompt"] is None and values["train.guards"] == "(<object>,)"


@pytest.mark.parametrize(
    ("what", "words"),
    [("rnus/*", "rnus/* names no run"), ("empty", "is not a run and holds none"), ([], "name at least one run")],
    ids=["pattern", "folder", "nothing"],
)
def test_what_names_no_run_is_one_sentence(tmp_path, monkeypatch, what, words):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with raises_saying(RunError, words):
        read_runs(what)


def test_without_pandas_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)

    write_run(tmp_path / "a")
    monkeypatch.setattr(builtins, "__import__", without)
    with raises_saying(RunError, "pip install 'jaxscale[sweep]'"):
        js.runs(tmp_path / "a")


# --- differences ------------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path):
    for i, (lr, seed) in enumerate([(1e-3, 0), (1e-3, 1), (3e-3, 0)]):
        write_run(tmp_path / str(i), lr=lr, seed=seed)
    runs = read_runs(str(tmp_path / "*"))
    assert differing(runs) == {"train.lr": [1e-3, 1e-3, 3e-3], "train.seed": [0, 1, 0]}
    assert [(g.label, g.runs) for g in groups_of(runs)] == [("lr=0.001", (0, 1)), ("lr=0.003", (2,))]
    assert shared(runs)["model/Transformer.depth"] == 2 and "train.lr" not in shared(runs)


def test_a_setting_of_a_part_that_others_lack_is_no_difference(tmp_path):
    write_run(tmp_path / "a", optimizer="AdamW")
    write_run(tmp_path / "b", optimizer="Lion")
    runs = read_runs(str(tmp_path / "*"))
    assert list(differing(runs)) == ["train.optimizer"]
    assert [g.label for g in groups_of(runs)] == ["optimizer=AdamW", "optimizer=Lion"]


def test_an_axis_hides_the_binding_that_it_is(tmp_path):
    runs = read_runs(write_sweep(tmp_path / "sweep"))
    assert list(differing(runs)) == ["Transformer.depth", "train.seed"]


def test_a_run_without_a_config_stands_alone(tmp_path):
    for name in "ab":
        (write_run(tmp_path / name) / "config.gin").unlink()
    assert [g.runs for g in groups_of(read_runs(str(tmp_path / "*")))] == [(0,), (1,)]


def test_a_band_is_the_mean_least_and_greatest_of_the_seeds(tmp_path):
    values = np.random.default_rng(0).normal(3, 1, (3, 50))
    values[1, 30:] = np.nan
    for seed in range(3):
        write_run(tmp_path / str(seed), values[seed, : 50 - 10 * (seed == 2)], seed=seed)
    curves = curves_of(read_runs(str(tmp_path / "*")), "loss")
    values[2, 40:] = np.nan
    band = curves.band([0, 1, 2])
    for got, want in zip(band, (np.nanmean, np.nanmin, np.nanmax), strict=False):
        np.testing.assert_allclose(got, want(values, axis=0))
    np.testing.assert_array_equal(band[3], np.isfinite(values).sum(0))


def test_thinned_points_are_means_of_consecutive_steps(tmp_path):
    values = np.random.default_rng(1).normal(size=95)
    write_run(tmp_path / "a", values)
    curves = curves_of(read_runs(tmp_path / "a"), "loss", points=10)
    assert curves.thinned == 10 and curves.steps.tolist() == [*range(10, 91, 10), 95]
    np.testing.assert_allclose(curves.values[0, :9], values[:90].reshape(9, 10).mean(1))
    np.testing.assert_allclose(curves.values[0, 9], values[90:].mean())


# --- the page ---------------------------------------------------------------------------------------------------------


def test_a_sweep_gives_a_page_and_two_pictures_in_its_folder(tmp_path, capsys):
    folder = write_sweep(tmp_path / "sweep")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p not in before}
    assert names == {"report.html", "curves.png", "parallel.png"}
    assert all(p.read_bytes() == text for p, text in before.items())


def test_a_page_has_a_group_for_each_setting_and_an_axis_for_each_difference(tmp_path):
    view = Page(write_sweep(tmp_path / "sweep"))
    assert [(g["label"], g["runs"]) for g in view.data["groups"]] == [
        ("depth=2", [0, 1, 2]),
        ("depth=4", [3, 4, 5]),
        ("depth=3", [6]),
    ]
    assert [axis["name"] for axis in view.data["parallel"]["axes"]] == ["Transformer.depth", "eval_loss"]
    depth, loss = view.data["parallel"]["axes"]
    assert loss["values"][-1] is None and (depth["missing"], loss["missing"]) == ("below", "above")
    assert max(_heights(loss)) == _heights(loss)[-1] > 1, "a run that did not come to an end is not below the best"
    assert 'axis.missing === "above" ? top - 16' in view.scripts[-1]
    assert "width = 16 is not divisible by heads = 3" in view.text


def test_a_page_needs_no_network(tmp_path):
    view = Page(write_run(tmp_path / "a", sample="def f(): pass"))
    assert not [a for _, attributes in view.tags for a in ("src", "href") if a in attributes]
    assert ("meta", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'") in [
        (tag, attributes.get("content")) for tag, attributes in view.tags
    ]


def test_what_runs_say_stays_text(tmp_path):
    first = write_run(tmp_path / "<b>a", sample="def " + EVIL, status="failed", error=EVIL)
    (first / "config.gin").write_text(f"train.prompt = {EVIL!r}\n")
    second = write_run(tmp_path / "b", sample=EVIL, versions={EVIL: EVIL})
    (second / "config.gin").write_text("train.prompt = 'x'\n")
    view = Page(first, second)
    assert view.data["parallel"]["axes"][0]["values"] == [EVIL, "x"]
    assert len(view.scripts) == 2 and not [tag for tag, _ in view.tags if tag in ("img", "b")]
    assert view.text.count(EVIL) >= 4


def test_numbers_that_are_none_do_not_break_a_page(tmp_path):
    write_run(tmp_path / "a", [3, np.nan, np.inf, 2], {4: np.nan})
    write_run(tmp_path / "b", [], lr=2e-3)
    write_run(tmp_path / "c", [5.0], {1: 4.0}, lr=4e-3, depth=3)
    runs = {m["name"]: m["runs"] for m in Page(tmp_path / "?").data["metrics"]}
    assert runs["loss"][0] == [3, "nan", "nan", 2] and runs["loss"][2][1:] == [None] * 3
    assert runs["eval_loss"][0] == [None, "nan"]


def test_pictures_are_drawn_of_numbers_that_are_none(tmp_path):
    write_run(tmp_path / "r/a", [3, np.nan, np.inf, 2], {4: np.nan})
    write_run(tmp_path / "r/b", [], lr=2e-3)
    write_run(tmp_path / "r/c", [5.0], {1: 4.0}, lr=4e-3)
    messages: list[str] = []
    folder = report(tmp_path / "r", tmp_path / "out", tell=messages.append).parent
    assert not messages and {p.name for p in folder.iterdir()} == {"report.html", "curves.png", "parallel.png"}


def test_forty_runs_are_a_page_of_moderate_size(tmp_path):
    for i in range(40):
        write_run(tmp_path / f"{i:02}", np.linspace(4, 1, 600), lr=1e-4 * (i + 1))
    assert len(page(read_runs(tmp_path), "Forty")) < 400_000


def test_a_file_that_is_no_report_is_not_written_over(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "a/curves.png").write_bytes(b"mine")
    with raises_saying(RunError, "curves.png", "not a report of jaxscale's", "--out"):
        report(tmp_path / "a")
    assert (tmp_path / "a/curves.png").read_bytes() == b"mine" and not (tmp_path / "a/report.html").exists()


def test_an_own_report_is_made_anew(tmp_path):
    report(write_run(tmp_path / "a"))
    (tmp_path / "a/metrics.jsonl").write_bytes(json_row({"step": 1, "loss": 7.0}))
    assert '"runs": [[7.0]]' in report(tmp_path / "a").read_text()


def test_without_matplotlib_the_page_is_written_and_a_message_names_the_rest(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    messages: list[str] = []
    assert report(write_run(tmp_path / "a"), tell=messages.append).exists()
    assert "pip install 'jaxscale[plot]'" in messages[0]


def test_a_run_keeps_its_sample_for_the_page(tmp_path):
    record = Record.__new__(Record)
    record._trackers = None
    record.run = js.Run(write_run(tmp_path / "a"))
    record.sample(3, "def ", "def a sample(): é")
    assert "a sample(): é" in Page(tmp_path / "a").text


def test_a_metric_that_no_run_has_is_named_with_the_nearest(tmp_path):
    with raises_saying(RunError, "'los'", "did you mean 'loss'"):
        page(read_runs(write_run(tmp_path / "a")), "A page", metric="los")


def test_runs_that_all_failed_at_once_are_a_page_of_their_errors(tmp_path):
    write_run(tmp_path / "a", [], status="failed", error="width = 16 does not suit it")
    assert "width = 16 does not suit it" in page(read_runs(tmp_path / "a"), "A page", metric="eval_loss")
