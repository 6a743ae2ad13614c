"""Reports of malformed folders: the page is made, and a sentence on it names what could not be read."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

from jaxscale.errors import RunError
from jaxscale.sweep.comparing.report import report
from jaxscale.train.metrics import json_row
from tests.sweep.test_comparing import write_run

OUTCOME = {"state": "finished", "steps": 3, "seconds": 2.5, "error": None}


@pytest.fixture
def sweep(tmp_path):
    """A sweep of two runs; tests damage the second."""
    folder = tmp_path / "sweep"
    (folder / "jobs").mkdir(parents=True)
    lines = [{"id": n, "bindings": {"train.lr": f"0.{n + 1}"}, "until": None} for n in range(2)]
    (folder / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "sweep.gin").write_text("sweep.objective = 'loss'\n")
    for n in range(2):
        run = write_run(folder / f"00{n}", lr=0.1 * (n + 1), sample="def f(): pass")
        (run / "outcome.json").write_text(json.dumps(OUTCOME))
        (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in (1, 2, 3)))
    return folder


def unreadable(folder):
    """The sentences on a folder's page about unreadable files, a list for each run that has any."""
    text = report(folder, folder / "out", pictures=False).read_text()
    assert "<h2>Runs</h2>" in text
    return [part.replace("&#x27;", "'") for part in re.findall(r"unreadable: (.*?)</dd>", text)]


def written(text):
    return lambda path: path.write_bytes(text.encode() if isinstance(text, str) else text)


def changed(**fields):
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def added(text):
    def change(path):
        with path.open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    return change


def replaced(make):
    def change(path):
        path.unlink()
        make(path)

    return change


def sealed_then_cut(path):
    rows = b"".join(json_row({"step": n, "loss": 1.0 / n}) for n in (1, 2, 3))
    path.write_bytes(rows.replace(b"0.5", b"0.4"))


def linked_out(content):
    """Replace a file by a link to a file outside of the folder."""

    def change(path):
        path.unlink()
        (path.parents[1] / "secret").write_text(content)
        path.symlink_to(path.parents[1] / "secret")

    return change


MISSING, PIPE, FOLDER = (lambda p: p.unlink()), replaced(os.mkfifo), replaced(os.mkdir)
DEVICE, DANGLING = (replaced(lambda path, to=to: path.symlink_to(to)) for to in ("/dev/zero", "/nowhere"))
LOOP = replaced(lambda path: path.symlink_to(path))
BINARY, DEEP = written(b"\xff\x00\xfe[1, 2\n"), written("[" * 3000)

CONFIG, INFO, METRICS = "001/config.gin", "001/run.json", "001/metrics.jsonl"
OUTCOMES, SAMPLES, TRIALS = "001/outcome.json", "001/samples.jsonl", "trials.jsonl"
CASES = {
    # damage: (file, change, words of the sentence)
    "config missing": (CONFIG, MISSING, "config.gin: No such file"),
    "config empty": (CONFIG, written(""), "config.gin: it has no binding"),
    "config binary": (CONFIG, BINARY, "config.gin is damaged: byte 0 is not UTF-8"),
    "config of prose": (CONFIG, written("Dear reader,\n"), "config.gin: it has no binding"),
    "config pipe": (CONFIG, PIPE, "config.gin: it is a pipe and not a file"),
    "config folder": (CONFIG, FOLDER, "config.gin: it is a folder and not a file"),
    "config device": (CONFIG, DEVICE, "config.gin: it is a device and not a file"),
    "config loop": (CONFIG, LOOP, "config.gin: Too many levels of symbolic links"),
    "config linked out": (CONFIG, linked_out("key = 'open sesame'\n"), "config.gin: it is a link out of its"),
    "config that includes": (CONFIG, written("include '/etc/passwd'\n"), "config.gin: it has no binding"),
    "info missing": (INFO, MISSING, "run.json: No such file"),
    "info empty": (INFO, written(""), "run.json is damaged: Expecting value"),
    "info binary": (INFO, BINARY, "run.json is damaged: "),
    "info torn": (INFO, written('{"status": "fini'), "run.json is damaged: Unterminated string"),
    "info list": (INFO, written("[1]"), "run.json is damaged: it is not a JSON object"),
    "info deep": (INFO, DEEP, "run.json is damaged: it is nested more than 100 deep"),
    "info pipe": (INFO, PIPE, "run.json: it is a pipe and not a file"),
    "info folder": (INFO, FOLDER, "run.json: it is a folder and not a file"),
    "info dangling": (INFO, DANGLING, "run.json: No such file"),
    "info linked out": (INFO, linked_out('{"status": "open sesame"}'), "run.json: it is a link out of its"),
    "info: status": (INFO, changed(status={"a": 1}), "run.json: status = {'a': 1} is not text"),
    "info: error": (INFO, changed(error=["a"]), "run.json: error = ['a'] is not text"),
    "info: started": (INFO, changed(started=5), "run.json: started = 5 is not text"),
    "info: parameters": (INFO, changed(parameters=10**400), "run.json: parameters = '1000000"),
    "info: hardware": (INFO, changed(hardware=[1]), "run.json: hardware = [1] is not an object"),
    "info: versions": (INFO, changed(versions="x" * 5000), "run.json: versions = 'xxxx"),
    "info: mesh": (INFO, changed(layout={"mesh": [2]}), "run.json: layout.mesh is not an object"),
    "metrics binary": (METRICS, BINARY, "metrics.jsonl, line 1: not what was written"),
    "metrics of a list": (METRICS, written("[1]\n[2]\n"), "metrics.jsonl, lines 1, 2: not what was written"),
    "metrics edited": (METRICS, sealed_then_cut, "metrics.jsonl, line 2: not what was written"),
    "metrics without step": (METRICS, added('{"loss": 1}\n'), "metrics.jsonl: 1 lines have no step"),
    "metrics: NaN step": (METRICS, added('{"step": NaN}\n'), "metrics.jsonl: 1 lines have no step"),
    "metrics: huge step": (METRICS, added(f'{{"step": {10**30}}}\n'), "metrics.jsonl: 1 lines have no step"),
    "metrics: text": (METRICS, added('{"step": 4, "loss": "a"}\n'), "metrics.jsonl: loss is not a number at step 4"),
    "metrics: huge": (METRICS, added(f'{{"step": 4, "loss": {10**400}}}\n'), "metrics.jsonl: loss is not a number at"),
    "metrics: nested": (METRICS, added('{"step": 4, "loss": {"a": [1]}}\n'), "loss is not a number at step 4"),
    "metrics pipe": (METRICS, PIPE, "metrics.jsonl cannot be read: it is a pipe and not a file"),
    "metrics folder": (METRICS, FOLDER, "metrics.jsonl cannot be read: it is a folder and not a file"),
    "metrics linked out": (METRICS, linked_out('{"step": 1, "loss": 7}\n'), "it is a link out of its folder"),
    "outcome empty": (OUTCOMES, written(""), "outcome.json is damaged: Expecting value"),
    "outcome: state": (OUTCOMES, changed(state=["a"]), "outcome.json: state = ['a'] is not text"),
    "outcome: seconds": (OUTCOMES, changed(seconds="long"), "outcome.json: seconds = 'long' is not a number"),
    "outcome: error": (OUTCOMES, changed(error=7), "outcome.json: error = 7 is not text"),
    "outcome folder": (OUTCOMES, FOLDER, "outcome.json: it is a folder and not a file"),
    "samples: number": (SAMPLES, added('{"step": 1, "text": 5}\n'), "samples.jsonl: 1 lines have no text"),
    "samples binary": (SAMPLES, BINARY, "samples.jsonl, line 1: not what was written"),
    "samples pipe": (SAMPLES, PIPE, "samples.jsonl: it is a pipe and not a file"),
    "samples linked out": (SAMPLES, linked_out('{"text": "open sesame"}\n'), "it is a link out of its folder"),
    "trials without a run": (TRIALS, written('{"id": 0, "bindings": {}}\n'), "trials.jsonl has no bindings of this"),
    "trials: bindings": (TRIALS, written('{"id": 1, "bindings": 5}\n'), "trials.jsonl has no bindings"),
    "trials linked out": (TRIALS, linked_out('{"id": 1, "bindings": {"a": "2"}}'), "it is a link out"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_report_names_what_it_cannot_read(sweep, case):
    name, change, words = CASES[case]
    change(sweep / name)
    problem, *others = unreadable(sweep)
    assert words in problem and len(problem) < 500 and set(others) <= {problem}  # a sweep file, once per run


def test_a_report_that_follows_no_links_shows_nothing_of_others(sweep):
    for name, content in {"config.gin": "key = 'sesame'\n", "samples.jsonl": '{"text": "sesame"}\n'}.items():
        linked_out(content)(sweep / "001" / name)
    unreadable(sweep)
    assert "sesame" not in (sweep / "out" / "report.html").read_text()


def test_a_link_within_the_folder_and_a_link_to_what_is_sealed_are_followed(sweep, tmp_path):
    config, metrics = sweep / "001" / "config.gin", sweep / "001" / "metrics.jsonl"
    config.rename(sweep / "001" / "own.gin")
    config.symlink_to("own.gin")
    metrics.write_bytes(b"".join(json_row({"step": n, "loss": 1.0 / n}) for n in (1, 2)))
    shutil.move(metrics, tmp_path / "stored")
    metrics.symlink_to(tmp_path / "stored")
    assert not unreadable(sweep)


@pytest.mark.parametrize("name", ["checkpoints", "jobs", "loss.png", "results.csv", ".lock"])
def test_files_that_a_report_does_not_read_may_be_anything(sweep, name):
    for place in (sweep / name, sweep / "001" / name):
        shutil.rmtree(place, ignore_errors=True)
        os.mkfifo(place)
    assert not unreadable(sweep)


def test_a_sweep_of_one_bad_run_and_an_empty_folder_end_in_a_page_and_a_sentence(sweep, tmp_path):
    shutil.rmtree(sweep / "000")
    for path in (sweep / "001").iterdir():
        path.write_bytes(b"\xff")
    (problem,) = unreadable(sweep)
    assert problem.count("is damaged") == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="is not a run and holds none"):
        report(tmp_path / "empty", pictures=False)
