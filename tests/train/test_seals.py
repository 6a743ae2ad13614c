"""The small files of a folder: damage and edits are seen before anything is used, and edits are taken when told to."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxscale as js
from jaxscale.cli import main
from jaxscale.errors import AlteredFile, CheckpointError, DamagedFile, RunError
from jaxscale.plan.laws.table import read_rows
from jaxscale.seals import Lines, open_json, open_text, seal_json, seal_line, seal_text, unmarked
from jaxscale.sweep.base import DAMAGED, FINISHED, Trial
from jaxscale.sweep.journal import Journal, read_records, run_folder
from jaxscale.sweep.outcomes import Outcome
from jaxscale.sweep.table import write_results
from jaxscale.train import checkpoints_in, read_config
from jaxscale.train.files import accept_edits, read_gin, read_json, states, write_gin, write_json
from jaxscale.train.folders import check_files, unfinished
from jaxscale.train.metrics import MetricsFile, read_metrics
from jaxscale.train.run import take_companions, write_config
from jaxscale.train.skips import Skips, read_skips
from tests.truth.runs import bigram

GIN = js.config.dumps("train", js.TrainConfig(prompt="é\u2028\x0b'", model=js.models.Transformer.Config()).values())
INFO = {
    "id": "ab12",
    "status": "finished",
    "step": 4,
    "layout": None,
    "loss": {"name": "é", "z": 1e-4},
    "command": ["x"],
}
TRIALS = [{"id": i, "bindings": {"train.lr": f"{1e-3 * i}", "train.seed": str(i)}, "until": None} for i in range(4)]


def flipped(data, bit):
    content = bytearray(data)
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


def flips(data, count, seed=0):
    size = 8 * len(data)
    return (flipped(data, bit) for bit in random.Random(seed).sample(range(size), min(count, size)))


def edit(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.fixture
def run(tmp_path):
    """A run's folder without checkpoints."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, js.TrainConfig(**bigram()), 0)
    write_json(folder / "run.json", INFO)
    return folder


@pytest.fixture
def sweep(tmp_path):
    """A sweep's folder of four finished trials."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    journal = Journal(folder, "loss")
    for row in TRIALS:
        path = journal.claim(Trial(row["id"], {k: float(v) for k, v in row["bindings"].items()}))
        path.mkdir()
        metrics = MetricsFile(path / "metrics.jsonl")
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss": 3.0 / step + row["id"]})
        metrics.close()
        Outcome(FINISHED, 3, 1.5).write(path)
    journal.close()
    return folder


# --- every flipped bit ------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_config_is_seen():
    data = seal_text(GIN).encode()
    assert open_text(data) == (GIN, True)
    for wrong in flips(data, 400):
        with pytest.raises(DamagedFile):
            open_text(wrong)


@pytest.mark.parametrize("indent", [None, 2])
def test_every_flipped_bit_of_a_json_file_is_seen_or_changes_no_value(indent):
    data = seal_json(INFO, indent).encode()
    assert open_json(data) == (INFO, True)
    for wrong in flips(data, 400):
        try:
            assert open_json(wrong)[0] == INFO
        except DamagedFile:
            pass


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_flipped_bit_of_a_file_of_lines_is_seen_or_changes_no_value(count):
    rows, data = TRIALS[:count], b"".join(map(seal_line, TRIALS[:count]))
    ends = (flipped(data, 8 * at + bit) for at in (-1, -11, len(data) // count - 1) for bit in range(8))
    for wrong in (*ends, *flips(data, 300)):
        lines = Lines()
        read = lines.feed(wrong) + lines.end()
        got = [{k: v for k, v in row.items() if k in rows[0]} for row in read]  # its digest by another name is no harm
        assert got == rows or lines.damaged and all(row in rows for row in got)


def test_a_text_that_was_cut_or_that_lost_a_seal_is_seen():
    text = seal_text(GIN)
    lines = text.splitlines(keepends=True)
    for wrong in ("".join(lines[:-1]), "".join(lines[1:]), text[:-70], "".join(lines[:-3]), text + "train.lr = 1.0\n"):
        with pytest.raises(DamagedFile):
            open_text(wrong.encode())
    assert unmarked(text) == GIN and unmarked("") == "" and open_text(GIN.encode()) == (GIN, False)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_an_edit_of_a_config_is_named_and_taken_when_told_to(run, capsys):
    edit(run / "config.gin", "train.steps = 4", "train.steps = 9")
    before = list((run / "config.gin").read_text().splitlines())
    readers = (
        read_config,
        lambda folder: js.Run(folder).config,
        check_files,
        lambda folder: js.fit(run=folder, resume=True),
    )
    for read in readers:
        with pytest.raises(AlteredFile, match=r"run/config\.gin is not what was written.*--accept-edits"):
            read(run)
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "run/config.gin is not what was written" in capsys.readouterr().out
    with pytest.raises(AlteredFile) as error:
        read_config(run)
    assert main(re.search("jaxscale (checkpoint .*--accept-edits)", str(error.value))[1].split()) == 0
    assert f"accepted the edit of {run / 'config.gin'}" in capsys.readouterr().err
    assert read_config(run).steps == 9
    assert (run / "config.gin").read_text().splitlines()[:-1] == before[:-1]


def test_an_added_line_and_a_replaced_file_are_edits(run):
    with (run / "config.gin").open("a") as file:
        file.write("train.steps = 7\n")
    with pytest.raises(AlteredFile, match="accept-edits"):
        read_config(run)
    assert accept_edits(run) == [run / "config.gin"] and read_config(run).steps == 7
    (run / "config.gin").write_text(read_gin(run / "config.gin").replace("train.steps = 7", "train.steps = 5"))
    with pytest.raises(AlteredFile, match="its seal is gone"):
        read_config(run)
    assert accept_edits(run) == [run / "config.gin"] and read_config(run).steps == 5 and accept_edits(run) == []


@pytest.mark.parametrize("argv", [["explain"], ["sample"], ["eval"], ["train", "--resume"]])
def test_a_config_that_includes_a_file_of_this_machine_shows_nothing_of_it(run, tmp_path, capsys, argv):
    (tmp_path / "secret").write_text("sesame open\n")
    for include in (f"include '{tmp_path}/secret'\n", "include '../secret'\n"):
        write_gin(run / "config.gin", read_gin(run / "config.gin") + include)
        assert main([*argv, str(run)]) == 2
        output = capsys.readouterr().err
        assert "this config may not read other files" in output and "sesame" not in output, output


def test_a_config_that_is_a_link_to_a_file_of_this_machine_shows_nothing_of_it(run, tmp_path, capsys):
    (tmp_path / "secret").write_text("sesame open\n")
    (run / "run.json").write_text(json.dumps(INFO))  # of an earlier version, which sealed nothing
    (run / "config.gin").unlink()
    (run / "config.gin").symlink_to(tmp_path / "secret")
    assert main(["explain", str(run)]) == 2 and main(["checkpoint", "verify", str(run)]) == 1
    output = "".join(capsys.readouterr())
    assert output.count("it is a link out of its folder; copy the file into it") == 2 and "sesame" not in output


def test_a_config_that_is_not_text_is_a_sentence(run):
    path = run / "config.gin"
    path.write_bytes(path.read_bytes().replace(b"train.steps", b"train.\xffteps"))
    for read in (read_config, accept_edits):
        with pytest.raises(AlteredFile, match=r"config\.gin is damaged: byte \d+ is not UTF-8; restore it from a copy"):
            read(run)


def test_an_edit_of_run_json_is_named_and_taken_when_told_to(run):
    edit(run / "run.json", "ab12", "cd34")
    for read in (lambda: js.Run(run).info, lambda: js.load(run), lambda: checkpoints_in(run), lambda: check_files(run)):
        with pytest.raises(AlteredFile, match=r"run/run\.json is not what was written.*--accept-edits"):
            read()
    assert accept_edits(run) == [run / "run.json"] and js.Run(run).info["id"] == "cd34"


def test_a_damaged_run_json_may_be_removed_as_the_sentence_says(run):
    (run / "run.json").write_bytes((run / "run.json").read_bytes()[:40])
    with pytest.raises(AlteredFile, match="run.json is damaged.*restore it from a copy, or remove it"):
        checkpoints_in(run)
    (run / "run.json").unlink()
    assert checkpoints_in(run).steps() == [] and read_config(run).steps == 4


def test_the_newest_run_is_not_passed_over_because_its_config_was_edited(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    Path("runs").mkdir()
    run.rename("runs/demo-1")
    write_json(Path("runs/demo-1/run.json"), INFO | {"status": "stopped"})
    edit(Path("runs/demo-1/config.gin"), "train.steps = 4", "train.steps = 9")
    with pytest.raises(AlteredFile, match="--accept-edits.*name another folder with --run"):
        unfinished("demo", js.TrainConfig(**bigram()))


def test_an_earlier_versions_folder_is_read_and_its_files_are_named_once(run, capsys):
    (run / "config.gin").write_text(read_gin(run / "config.gin"))
    (run / "run.json").write_text(json.dumps(INFO))
    assert read_config(run) == js.TrainConfig(**bigram()) and js.Run(run).info == INFO
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out == "not sealed, since an earlier version wrote them: config.gin, run.json\n"
    write_config(run, js.TrainConfig(**bigram()), 3)
    assert [state.sealed for state in states(run)] == [True, False] and not (run / "config.until-3.gin").exists()


def test_edits_are_not_accepted_while_a_process_trains_in_the_folder(run):
    from jaxscale.train.folders import lock

    edit(run / "run.json", "ab12", "cd34")
    with lock(run), pytest.raises(RunError, match="a process is at work"):
        accept_edits(run)


def test_accepting_needs_a_folder_and_one_process(run, capsys):
    assert main(["report", "--accept-edits"]) == 2
    assert "name one" in capsys.readouterr().err


# --- files whose form leaves no place for a seal ----------------------------------------------------------------------


@pytest.fixture
def imported(run, tmp_path):
    """A run with what came with its weights."""
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        (tmp_path / "model" / name).write_text(json.dumps({"eos_token_id": 1, "temperature": 0.5}))
    take_companions(tmp_path / "model", run)
    return run


def test_every_flipped_bit_of_what_came_with_the_weights_is_seen(imported):
    path = imported / "hf" / "tokenizer.json"
    assert js.Run(imported).imported is not None
    for wrong in flips(path.read_bytes(), 40):
        path.write_bytes(wrong)
        with pytest.raises(AlteredFile, match="hf/tokenizer.json is not what was written: its SHA-256"):
            _ = js.Run(imported).imported


def test_an_edit_of_what_came_with_the_weights_is_named_and_taken_when_told_to(imported, capsys):
    edit(imported / "hf/generation_config.json", "0.5", "0.7")
    with pytest.raises(AlteredFile) as error:
        js.Run(imported).choice()
    assert main(["checkpoint", "verify", str(imported)]) == 1
    assert "hf/generation_config.json is not what was written" in capsys.readouterr().out
    assert main(re.search("jaxscale (checkpoint .*--accept-edits)", str(error.value))[1].split()) == 0
    assert js.Run(imported).choice() == {"temperature": 0.7}
    edit(imported / "hf/config.json", "0.5", "0.6")
    with pytest.raises(AlteredFile, match="hf/config.json"):
        _ = js.Run(imported).imported


def test_a_file_that_came_with_the_weights_and_is_gone_is_named_and_one_that_is_added_is_taken(imported, capsys):
    (imported / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    assert js.Run(imported).end_ids == (1,) and main(["checkpoint", "verify", str(imported)]) == 0
    (imported / "hf" / "tokenizer.json").unlink()
    assert main(["checkpoint", "verify", str(imported)]) == 1
    assert "hf/tokenizer.json cannot be read: No such file" in capsys.readouterr().out


def test_a_folder_of_an_earlier_version_has_no_list_and_is_read(imported):
    (imported / "digests.json").unlink()
    edit(imported / "hf/generation_config.json", "0.5", "0.7")
    assert js.Run(imported).choice() == {"temperature": 0.7}


def test_a_damaged_list_of_digests_is_named(imported, capsys):
    edit(imported / "digests.json", "hf/config", "hf/confih")
    with pytest.raises(AlteredFile, match=r"digests.json is not what was written"):
        _ = js.Run(imported).imported
    assert main(["checkpoint", "verify", str(imported)]) == 1
    assert "digests.json is not what was written" in capsys.readouterr().out


def test_a_link_out_of_what_came_with_the_weights_is_refused(imported, tmp_path):
    (tmp_path / "secret").write_text("{}")
    (imported / "hf" / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="vocab.json is a link out of its folder"):
        _ = js.Run(imported).imported


def test_a_damaged_table_of_a_sweep_is_not_fitted(sweep, capsys):
    write_results(sweep, read_records(sweep, "loss"))
    assert len(read_rows(sweep)) == 4
    edit(sweep / "results.csv", "1.5", "1.6")
    for source in (sweep, sweep / "results.csv"):
        with pytest.raises(AlteredFile, match="results.csv is not what was written.*--accept-edits"):
            read_rows(source)
    assert main(["checkpoint", "verify", str(sweep)]) == 1
    assert "results.csv is not what was written" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(sweep), "--accept-edits"]) == 0
    assert read_rows(sweep)[0]["seconds"] == "1.6"


def test_a_table_whose_writing_was_cut_short_is_the_one_of_before(sweep, monkeypatch):
    records = read_records(sweep, "loss")
    for count in (1, 2, 3):
        write_results(sweep, records[:count])

    def killed(path, text):
        if path.name == "results.csv":
            raise KeyboardInterrupt
        path.write_text(text)

    monkeypatch.setattr("jaxscale.train.files.write_text", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            write_results(sweep, records)
        assert len(read_rows(sweep)) == 3


# --- files that grow --------------------------------------------------------------------------------------------------


def test_a_damaged_line_of_metrics_is_left_out_and_named(run, capsys):
    metrics = MetricsFile(run / "metrics.jsonl")
    for step in (1, 2, 3):
        metrics.write({"step": step, "loss": 0.5 * step})
    metrics.close()
    edit(run / "metrics.jsonl", '"loss": 1.0', '"loss": 1.5')
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 3]
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "metrics.jsonl, line 2: not what was written" in capsys.readouterr().out
    accept_edits(run)
    assert [row["loss"] for row in read_metrics(run / "metrics.jsonl")] == [0.5, 1.5, 1.5]


def test_a_damaged_line_of_skipped_steps_is_not_gone_on_with(run):
    Skips(run / "skipped.jsonl").pass_over([5, 6], 4, "a spike")
    assert read_skips(run / "skipped.jsonl")[0]["passed_over"] == [5, 6]
    edit(run / "skipped.jsonl", "[5, 6]", "[5, 7]")
    with pytest.raises(AlteredFile, match="skipped.jsonl, line 1"):
        Skips(run / "skipped.jsonl")


def test_a_line_torn_by_a_kill_is_no_damage(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from jaxscale.seals import seal_line
file = Path({str(tmp_path / "metrics.jsonl")!r}).open("ab", buffering=0)
file.write(seal_line({{"step": 1}}))
file.write(seal_line({{"step": 2, "loss": 0.25}})[:-9])
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=os.getcwd()).returncode == -signal.SIGKILL
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == [{"step": 1}] and [state.fault for state in states(tmp_path)] == [None]
    file = MetricsFile(path)
    file.write({"step": 2})
    file.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}] and [state.fault for state in states(tmp_path)] == [None]


def test_lines_of_an_earlier_version_may_be_torn_and_be_followed_by_sealed_ones():
    lines = Lines()
    data = b'{"step": 1}\n{"ste\n{"step": 2}\n' + seal_line({"step": 3}) + b'{"step": 4}\n'
    assert [row["step"] for row in lines.feed(data)] == [1, 2, 3]
    assert lines.damaged == {5: {"step": 4}}  # who writes now seals what he writes


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_a_bad_outcome_is_one_damaged_trial_of_a_sweep_that_is_read(sweep):
    for damage in (lambda p: edit(p, '"steps": 3', '"steps": 2'), lambda p: p.write_bytes(b'{"sta\xff'),
                   lambda p: p.write_text('{"state": "won"}'), lambda p: p.write_text('{"colour": 3}')):  # fmt: skip
        Outcome(FINISHED, 3, 1.5).write(sweep / "001")
        damage(sweep / "001" / "outcome.json")
        records = read_records(sweep, "loss")
        assert [r.state for r in records] == [FINISHED, DAMAGED, FINISHED, FINISHED]
        assert "001/outcome.json" in records[1].error and "\n" not in records[1].error
    with pytest.raises(AlteredFile, match="or remove it: the trial continues"):
        Outcome.read(sweep / "001")


def test_a_damaged_trial_is_counted_and_can_be_tried_again(sweep):
    from jaxscale.sweep.table import best_of

    edit(sweep / "000" / "outcome.json", '"steps": 3', '"steps": 2')
    journal = Journal(sweep, "loss")
    assert best_of(journal.records()).trial.id == 1  # 000 would be better
    assert journal.retry_failed() == [0] and [r.state for r in journal.records()][0] == "waiting"
    journal.close()
    assert json.loads((sweep / "jobs/000.failed-1.json").read_text())["steps"] == 2


def test_an_edited_line_of_trials_is_named_and_taken_when_told_to(sweep):
    edit(sweep / "trials.jsonl", '"train.lr": "0.002"', '"train.lr": "0.005"')
    errors = []
    records = read_records(sweep, "loss", errors.append)
    assert [r.trial.bindings["train.lr"] for r in records] == [0.0, 1e-3, 2e-3, 3e-3]  # as jobs/ has it
    (error,) = errors
    assert "trials.jsonl, line 3: not what was written" in error and "--accept-edits" in error
    with pytest.raises(AlteredFile, match="trials.jsonl, line 3"):
        Journal(sweep, "loss")
    assert main(["checkpoint", "verify", str(sweep), "--accept-edits"]) == 0
    journal = Journal(sweep, "loss")
    assert journal.records()[2].trial.bindings["train.lr"] == 5e-3
    journal.close()


def test_a_line_of_trials_that_is_nowhere_else_leaves_a_damaged_trial(sweep):
    data = (sweep / "trials.jsonl").read_bytes()
    (sweep / "trials.jsonl").write_bytes(data.replace(b'{"id": 3', b'["id": 3'))
    assert [r.trial.bindings["train.lr"] for r in read_records(sweep, "loss", lambda text: None)][3] == 3e-3
    (sweep / "jobs/003.json").unlink()
    records = read_records(sweep, "loss", lambda text: None)
    assert [r.state for r in records] == [FINISHED] * 3 + [DAMAGED] and "its bindings are unknown" in records[3].error


def test_every_flipped_bit_of_trials_is_harmless_or_named(sweep):
    want, data = read_records(sweep, "loss"), (sweep / "trials.jsonl").read_bytes()
    for wrong in flips(data, 25):
        (sweep / "trials.jsonl").write_bytes(wrong)
        errors = []
        assert read_records(sweep, "loss", errors.append) == want  # jobs/ has what is lost
        if errors:
            assert "trials.jsonl, line" in errors[0]
    assert run_folder(sweep, 0).is_dir()


def test_an_earlier_versions_sweep_is_read(sweep):
    plain = b"".join(json.dumps(row).encode() + b"\n" for row in TRIALS) + b'{"id": 4, "bin'
    (sweep / "trials.jsonl").write_bytes(plain)
    for path in sweep.glob("0*/outcome.json"):
        path.write_text(json.dumps(read_json(path)))
    errors = []
    assert [r.state for r in read_records(sweep, "loss", errors.append)] == [FINISHED] * 4 and not errors
    Journal(sweep, "loss").close()


def test_verify_covers_a_sweep_and_its_trials(sweep, capsys):
    assert main(["checkpoint", "verify", str(sweep)]) == 0
    assert capsys.readouterr().out == "13 small files agree with their digests\n"
    edit(sweep / "002/metrics.jsonl", '"loss": 5.0', '"loss": 1.0')
    assert main(["checkpoint", "verify", str(sweep)]) == 1
    out = capsys.readouterr().out
    assert "002/metrics.jsonl, line 1" in out and "1 of 13 small files are not what was written" in out


@pytest.mark.parametrize(
    ("kind", "words"),
    [("folder", "it is a folder and not a file"), ("pipe", "it is a pipe and not a file"), ("link", "No such file")],
)
@pytest.mark.parametrize("name", ["run.json", "config.gin", "metrics.jsonl"])
def test_verify_names_what_stands_in_the_place_of_a_file(run, capsys, name, kind, words):
    (run / name).unlink(missing_ok=True)
    {"folder": os.mkdir, "pipe": os.mkfifo, "link": lambda p: p.symlink_to("/nowhere")}[kind](run / name)
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert f"{run / name} cannot be read: {words}" in capsys.readouterr().out


def test_verify_names_checkpoints_that_are_no_folder(run, capsys):
    (run / "checkpoints").write_text("")
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert f"{run / 'checkpoints'} is not a folder" in capsys.readouterr().out


def test_verify_names_a_config_that_is_gone(run, capsys):
    (run / "checkpoints").mkdir()
    assert main(["checkpoint", "verify", str(run)]) == 0
    (run / "config.gin").unlink()
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert f"{run / 'config.gin'} is missing" in capsys.readouterr().out
