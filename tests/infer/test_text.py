"""Text that comes token by token is the text of all tokens, and no half character or stop string is ever shown."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxscale.data import ByteTokenizer, HFTokenizer, train_bpe
from jaxscale.infer.text import TextStream

TEXTS = [
    "",
    " def f(x):\n\treturn 'é' * x\r\n",
    "grüße, 漢字 und 🙂🙃 👩‍👩‍👧, ẹ́.  two  spaces \u2028 and \ufffd itself",
    "the cat sat on the mat; the caterpillar did not.",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    pytest.importorskip("tokenizers")
    return train_bpe(["the cat sat on the mat, grüße 漢字 " * 20], 300, tmp_path_factory.mktemp("bpe") / "t.json")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """As SentencePiece vocabularies are: spaces in pieces, the first one dropped, bytes for what has no piece."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders = tokenizers.decoders
    names = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,;", "▁the", "▁cat", "at"]
    model = tokenizers.models.BPE(
        {n: i for i, n in enumerate(names)}, [("a", "t")], byte_fallback=True, fuse_unk=True, unk_token="<s>"
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
    made.save(str(path))
    return HFTokenizer(str(path), eos="<s>")


class Silent:
    """A tokenizer that tells no bytes."""

    def __init__(self, tokenizer):
        self.encode, self.decode = tokenizer.encode, tokenizer.decode


@pytest.fixture(params=["bytes", "bpe", "pieces", "silent"])
def tokenizer(request):
    made = {"bytes": ByteTokenizer, "silent": lambda: Silent(ByteTokenizer())}.get(request.param)
    return made() if made else request.getfixturevalue(request.param)


def _streamed(tokenizer, ids, stop=(), before=()):
    stream = TextStream(tokenizer, stop, before)
    pieces_of = [stream.push(i) for i in ids]
    return [*pieces_of, stream.finish()], stream.stopped


def test_what_is_shown_adds_up_to_the_whole_text(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        pieces_of, stopped = _streamed(tokenizer, ids)
        assert "".join(pieces_of) == tokenizer.decode(ids) == text and not stopped


def test_characters_are_shown_whole(tokenizer):
    text = TEXTS[2].replace("\ufffd", "")
    pieces_of, _ = _streamed(tokenizer, tokenizer.encode(text))
    assert not any("\ufffd" in s for s in pieces_of)
    assert sum(bool(s) for s in pieces_of) > 30  # and not all of it at the end


@pytest.mark.parametrize("name", ["bytes", "bpe", "silent"])
def test_tokens_that_are_no_text_come_out_as_they_decode(name, request):
    tokenizer = {"bytes": ByteTokenizer(), "silent": Silent(ByteTokenizer())}.get(name) or request.getfixturevalue(name)
    random = np.random.default_rng(0)
    for _ in range(60):
        ids = random.integers(1, 300, random.integers(1, 40))  # 0 is special
        assert "".join(_streamed(tokenizer, ids)[0]) == tokenizer.decode(ids)


def test_bytes_of_a_fallback_that_are_no_text_leave_what_was_shown_as_it_was(pieces):
    euro = [*"€".encode(), 0xE2]
    pieces_of, _ = _streamed(pieces, [1 + b for b in euro])
    assert "".join(pieces_of) == "€\ufffd" and pieces_of[2] == "€"


def test_a_continuation_keeps_its_first_space(pieces):
    prompt, ids = pieces.encode("the"), pieces.encode("the cat")
    pieces_of, _ = _streamed(pieces, ids[len(prompt) :], before=prompt)
    assert "".join(pieces_of) == " cat"
    assert "".join(_streamed(pieces, ids[len(prompt) :])[0]) == "cat"  # as a text of its own


def _first_completed(text, stops):
    """Where the text is cut: at the beginning of the stop string whose last character comes first."""
    for end in range(len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return text[: min(begins)], True
    return text, False


def test_stop_strings_cut_exactly_however_the_text_is_split(tokenizer):
    random = np.random.default_rng(1)
    for _ in range(120):
        text = "".join(random.choice(list("abé漢 "), random.integers(0, 30)))
        stops = ["".join(random.choice(list("abé漢 "), random.integers(1, 5))) for _ in range(random.integers(1, 4))]
        ids = tokenizer.encode(text)
        text = tokenizer.decode(ids)
        pieces_of, stopped = _streamed(tokenizer, ids, stops)
        assert ("".join(pieces_of), stopped) == _first_completed(text, stops)


def test_the_beginning_of_a_stop_string_waits_and_comes_when_it_was_none():
    stream = TextStream(ByteTokenizer(), ["\n\nend"])
    assert [stream.push(b) for b in b"a\n\nenb"] == ["a", "", "", "", "", "\n\nenb"]
    assert stream.push(ord("\n")) == "" and not stream.stopped
    assert stream.finish() == "\n"


def test_nothing_is_shown_after_a_stop():
    stream = TextStream(ByteTokenizer(), ["b"])
    assert [stream.push(b) for b in b"abcab"] == ["a", "", "", "", ""]
    assert stream.stopped and stream.finish() == ""


def test_bytes_of_every_token_are_those_it_decodes_to(bpe):
    special = json.loads(open(bpe.path, encoding="utf-8").read())["added_tokens"][0]["content"]
    assert bpe.token_bytes(bpe.eos_id) == special.encode()
    for i in range(bpe.vocab_size):
        assert bpe.token_bytes(i).decode("utf-8", "replace") == bpe.decode(np.asarray([i]))


def test_special_tokens_are_not_shown_but_end_a_text_that_stops_at_them(bpe):
    ids = [*bpe.encode("the"), bpe.eos_id, *bpe.encode(" cat")]
    assert "".join(_streamed(bpe, ids)[0]) == "the cat"
    pieces_of, stopped = _streamed(bpe, ids, stop=bpe.special)
    assert "".join(pieces_of) == "the" and stopped
