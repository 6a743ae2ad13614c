"""jaxscale laws: from a CSV to a fit, a picture and a prediction."""

from __future__ import annotations

import csv
import json

import pytest

from jaxscale.cli import main
from jaxscale.commands.laws import NAMES
from jaxscale.plan.laws import LAWS
from tests.truth import planted


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A folder in which the command has fitted Chinchilla's law."""
    folder = tmp_path_factory.mktemp("laws")
    table = write(folder / "results.csv", planted.surface_runs(planted.chinchilla_loss, seed=0))
    assert main(["laws", "fit", table, "--samples", "10", "--out", str(folder / "out")]) == 0
    return folder


def test_the_help_names_every_law(capsys):
    with pytest.raises(SystemExit):
        main(["laws", "fit", "--help"])
    assert tuple(LAWS) == NAMES and ", ".join(NAMES) in " ".join(capsys.readouterr().out.split())


def test_a_fit_leaves_a_file_and_a_picture(fitted):
    assert (fitted / "out/chinchilla.json").is_file()
    assert (fitted / "out/chinchilla.png").read_bytes()[:4] == b"\x89PNG"


def test_laws_are_compared_by_what_was_held_out(fitted, capsys):
    argv = ["laws", "fit", str(fitted / "results.csv"), "--law", "chinchilla,farseer", "--hold-out", "parameters:1"]
    assert main([*argv, "--samples", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [one["law"] for one in result] == ["chinchilla", "farseer"]
    assert all(one["held_out"]["runs"] == 5 and one["held_out"]["error"]["eval_loss"] < 0.05 for one in result)


def test_a_prediction_beyond_the_runs_says_how_far(fitted, capsys):
    argv = ["laws", "predict", str(fitted / "out/chinchilla.json"), "--parameters", "100B", "--tokens", "2T"]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["eval_loss"]["value"] == pytest.approx(planted.chinchilla_loss(1e11, 2e12), rel=0.02)
    assert any("parameters = 1e+11 is 39.1 times the largest" in note for note in result["notes"])
    assert main(argv) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert "warning: parameters = 1e+11 is 39.1 times the largest that the law was fitted on; no run shows" in message


def test_a_prediction_among_the_runs_and_just_beyond_them_is_not_called_untried(fitted, capsys):
    argv = ["laws", "predict", str(fitted / "out/chinchilla.json"), "--tokens", "10B", "--json", "--parameters"]
    notes = []
    for parameters in ("1B", "5B"):
        assert main([*argv, parameters]) == 0
        notes.append(json.loads(capsys.readouterr().out)["notes"])
    assert notes == [[], ["parameters = 5e+09 is 1.95 times the largest that the law was fitted on"]]


def test_a_budget_is_spent(fitted, capsys):
    assert main(["laws", "predict", str(fitted / "out/chinchilla.json"), "--flops", "1e20"]) == 0
    message = capsys.readouterr().out
    assert "the best that 1e+20 FLOPs buy" in message and "tokens a parameter" in message


@pytest.mark.parametrize(
    "argv, message",
    [
        (["fit", "{table}", "--law", "chinchila"], "no law 'chinchila'; did you mean 'chinchilla'?"),
        (["fit", "{table}", "--set", "detla=1"], "no law here has a setting 'detla'; did you mean 'delta'?"),
        (["fit", "{table}", "--set", "delta=small"], "--set delta=small: give a number, such as delta=0.001"),
        (["fit", "{table}", "--law", "ood", "--set", "losses=eval_los"], "no column 'eval_los'; did you mean"),
        (["fit", "{table}", "--out", "{table}"], "is a file; name a folder"),
        (["fit", "{table}", "--hold-out", "parameters:x"], "is not of the form COLUMN or COLUMN:COUNT"),
        (["fit", "nowhere"], "there is no nowhere"),
        (["predict", "{table}", "--flops", "1"], "is no fitted law"),
        (["predict", "nowhere.json", "--flops", "1"], "nowhere.json cannot be read: no such file"),
        (["predict", "{fit}"], "--parameters N --tokens D, or --flops C"),
        (["predict", "{fit}", "--tokens", "1e9"], "give both of them"),
        (["predict", "{fit}", "--tokens", "1e9", "--parameters", "0"], "parameters = 0"),
        (["predict", "{old}", "--flops", "1e20"], "has other settings than the law 'chinchilla'"),
    ],
    ids=[
        "law",
        "setting",
        "its value",
        "one loss",
        "out",
        "split",
        "csv",
        "no fit",
        "no file",
        "nothing",
        "half",
        "0",
        "old",
    ],
)
def test_a_mistake_is_one_sentence(fitted, capsys, argv, message):
    paths = {"table": fitted / "results.csv", "fit": fitted / "out/chinchilla.json", "old": fitted / "old.json"}
    paths["old"].write_text(paths["fit"].read_text().replace('"delta"', '"width"'))
    assert main(["laws", *(word.format(**paths) for word in argv)]) == 2
    assert message in capsys.readouterr().err
