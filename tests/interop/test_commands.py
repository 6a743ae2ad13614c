"""An imported chat model from the command line."""

from __future__ import annotations

import json

import pytest

import jaxscale as js
from jaxscale.cli import main
from tests.truth import hf_folder

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The folder of the run."""
    root = tmp_path_factory.mktemp("chat")
    folder = hf_folder.write_folder(root / "theirs")
    words = {"?": 0, "<s>": 1, "</s>": 2, "user": 3} | {f"w{i}": i for i in range(4, 96)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    assert main(["import", str(folder), str(root / "run")]) == 0
    return root / "run"


def test_sample_chats_as_the_run_does(imported, capsys):
    options = ["--chat", "--prompt", "w7 w8", "--max-tokens", "5", "--temperature", "0", "--ignore-end", "--json"]
    capsys.readouterr()
    assert main(["sample", str(imported), *options]) == 0
    row = json.loads(capsys.readouterr().out)
    run = js.load(imported)
    answer = run.chat([{"role": "user", "content": "w7 w8"}], max_tokens=5, temperature=0, ignore_end=True)
    assert (row["prompt"], row["text"], row["ids"]) == ("w7 w8", answer.text, list(answer.ids))
    assert answer.prompt_tokens == len([1, 3, 7, 8, 2, 1])


def test_it_has_no_held_out_documents_to_be_evaluated_on(imported, capsys):
    assert main(["eval", str(imported)]) == 2
    assert "is imported and has no held-out documents" in capsys.readouterr().err


def test_what_is_suggested_for_a_model_without_a_tokenizer_works(tmp_path, capsys):
    folder = hf_folder.write_folder(tmp_path / "theirs")
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "jaxscale sample" not in out
    ids = eval(out.partition("in Python, ")[2], {"js": js})
    assert ids and all(isinstance(i, int) for i in ids)
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert "in Python, js.load(" in capsys.readouterr().out


def test_merging_a_run_without_adapters_is_said(imported, tmp_path, capsys):
    assert main(["merge", str(imported), str(tmp_path / "merged")]) == 0
    assert "has no adapters" in capsys.readouterr().err
