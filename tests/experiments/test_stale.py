"""Results name commits that exist, and `make stale` notices changed code and no changed words."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from experiments import stale


@pytest.fixture(scope="module")
def whole_history() -> None:
    ran = subprocess.run(
        ["git", "-C", str(stale.ROOT), "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if ran.stdout.strip() != "false":
        pytest.skip("needs the repository's whole history")


def test_every_experiment_page_has_a_result_and_every_result_a_page() -> None:
    results = stale.results()
    assert len({result.name for result in results}) == len(results)
    for result in results:
        assert (stale.ROOT / result.page).is_file(), result
        assert not result.data or (stale.ROOT / result.data).exists(), result
        assert stale.working_files(result), result
    folders = {page.parent for page in (stale.ROOT / "experiments").glob("*/README.md")}
    assert folders <= {(stale.ROOT / result.page).parent for result in results}


def test_digests_are_those_of_the_named_commits(whole_history: None) -> None:
    for result in stale.results():
        assert stale.digest(stale.committed_files(result, result.commit)) == result.digest, result


def test_every_commit_beside_a_number_is_in_the_history(whole_history: None) -> None:
    known = subprocess.run(["git", "-C", str(stale.ROOT), "rev-list", "HEAD"], capture_output=True, text=True).stdout
    commits = known.split()
    files = [p for p in stale.ROOT.rglob("*.json*") if not set(p.parts) & {"runs"} and ".venv" not in str(p)]
    named = {
        (str(path), commit)
        for path in files
        if path.is_relative_to(stale.ROOT / "experiments")
        for commit in re.findall(r'"commit" ?: ?"([0-9a-f]{7,40})"', path.read_text())
    }
    pages = [stale.ROOT / "README.md", *(stale.ROOT / "experiments").glob("*/*.md"), *stale.ROOT.glob("docs/**/*.md")]
    named |= {
        (str(page), commit)
        for page in pages
        for commit in re.findall(r"\bcommits? `?([0-9a-f]{7,40})\b", page.read_text())
    }
    assert len(named) > 30
    assert [(path, c) for path, c in sorted(named) if not any(full.startswith(c) for full in commits)] == []


def test_only_code_changes_a_digest() -> None:
    before = {"a.py": b'"""Old words."""\nx = 1  # a reason\n\n\ny = "# kept"\n'}
    reworded = {"a.py": b'"""New\n\nwords."""\n\nx = 1\ny = "# kept"\n'}
    assert stale.digest(before) == stale.digest(reworded)
    assert stale.digest(before) != stale.digest({"a.py": b'x = 2\ny = "# kept"\n'})
    assert stale.digest(before) != stale.digest({"b.py": before["a.py"]})
    assert stale.digest({"a.gin": b"# one"}) != stale.digest({"a.gin": b"# two"})


def test_patterns_cross_folders_only_where_they_say_so() -> None:
    names = ["a/b.py", "a/c/d.py", "a/c.gin"]
    assert stale.matching(names, ("a/*.py",)) == ["a/b.py"]
    assert stale.matching(names, ("a/**/*.py",)) == ["a/b.py", "a/c/d.py"]


def test_recording_takes_the_current_commit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments],
            check=True,
            capture_output=True,
        )

    (tmp_path / "experiments").mkdir()
    (tmp_path / "law.py").write_text("x = 1\n")
    entry = '[[result]]\nname = "law"\npage = "p"\ndata = ""\ncommit = "0000000"\nsources = ["*.py"]\ndigest = "dead"\n'
    (tmp_path / "experiments" / "results.toml").write_text(entry)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    monkeypatch.setattr(stale, "RESULTS", tmp_path / "experiments" / "results.toml")
    assert stale.changed(stale.results()[0]) == ["*.py"], "no such commit: the patterns are all there is to name"
    recorded = stale.record("law")
    assert stale.results() == [recorded]
    assert stale.changed(recorded) == []
    (tmp_path / "law.py").write_text("x = 2\n")
    assert stale.changed(recorded) == ["law.py"]
    with pytest.raises(SystemExit, match="commit them, measure, then record"):
        stale.record("law")
    with pytest.raises(SystemExit, match="no result 'lwa'; did you mean law"):
        stale.record("lwa")


def test_without_a_repository_every_changed_result_names_its_patterns(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "law.py").write_text("x = 1\n")
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    result = stale.Result("law", "p", "", "0000000", ("*.py",), "dead")
    assert stale.committed_files(result, "0000000") == {}
    assert stale.changed(result) == ["*.py"]
