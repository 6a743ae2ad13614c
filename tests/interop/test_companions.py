"""Companion files of a checkpoint: tokens that start and end a text, and sampling settings."""

from __future__ import annotations

import json

import pytest

from jaxscale.errors import DataError
from jaxscale.interop import Companions, copy_companions
from jaxscale.interop.companions import FILES
from jaxscale.run import Run

tokenizers = pytest.importorskip("tokenizers")

WORDS = {"<s>": 1, "</s>": 2, "<|im_end|>": 3, "a": 4, "b": 5}


@pytest.fixture
def folder(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, **WORDS}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    return tmp_path


def _about(folder, **values):
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return Companions(folder)


def test_a_prompt_opens_as_the_tokenizer_opens_texts_and_is_not_closed(folder):
    assert Companions(folder).prompt_ids("a b").tolist() == [1, 4, 5]
    assert Companions(folder).prompt_ids("").tolist() == [1]
    # text that looks like a special token is ordinary text
    assert 2 not in Companions(folder).prompt_ids("a </s> b").tolist()


def test_its_config_says_whether_there_is_an_opening(folder):
    assert _about(folder, add_bos_token=False, bos_token="<s>").prompt_ids("a").tolist() == [4]
    assert _about(folder, add_bos_token=False, bos_token="<s>").prompt_ids("").tolist() == [1]
    companions = _about(folder, add_bos_token=True, bos_token={"content": "</s>", "lstrip": False})
    assert companions.prompt_ids("a").tolist() == [2, 4]


def test_texts_end_where_generation_config_says_else_config_else_the_tokenizer(folder):
    assert Companions(folder).end_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert Companions(folder).end_ids == (3, 2)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text("{}")
    assert _about(folder, eos_token="<|im_end|>").end_ids == (3,)


@pytest.mark.parametrize(
    "values, choice",
    {
        "cuts": (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            dict(temperature=0.6, top_k=20, top_p=0.95),
        ),
        "all": ({"temperature": 0.7, "top_k": 0}, dict(temperature=0.7)),
        "greedy": ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, dict(repetition_penalty=1.1)),
        "nothing": ({"eos_token_id": 2, "top_p": None}, {}),
    }.values(),
    ids=["cuts", "all", "greedy", "nothing"],
)
def test_tokens_are_chosen_as_generation_config_says(folder, values, choice):
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert Companions(folder).choice == choice


def test_a_choice_out_of_its_range_names_the_file(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"top_p": 1.5}))
    with pytest.raises(DataError, match=r"hf/generation_config.json: top_p = 1.5: must be above 0 and at most 1; edit"):
        Run(tmp_path).choice()
    assert Run(tmp_path).choice(but=["top_p"]) == {}


def test_without_a_tokenizer_there_are_ids_only(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="has no tokenizer.json, so only token ids can be used"):
        Companions(folder).prompt_ids("a")
    for name in ("config.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    assert Companions(folder).end_ids == ()  # and ids run to max_tokens


def test_all_of_them_travel_byte_for_byte_and_nothing_else(tmp_path):
    for name in (*FILES, "pytorch_model.bin", "modeling_own.py"):
        (tmp_path / name).write_bytes(name.encode() + b"\r\n\xff")
    assert copy_companions(tmp_path, tmp_path / "out") == list(FILES)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
        n: n.encode() + b"\r\n\xff" for n in FILES
    }
