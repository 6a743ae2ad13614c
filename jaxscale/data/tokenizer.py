"""Text to token ids and back: bytes in the core, Hugging Face `tokenizers` files with the `hf` extra."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Int32, Int64, Integer

from jaxscale import reading
from jaxscale.config import register
from jaxscale.errors import DataError, near

if TYPE_CHECKING:
    import tokenizers

    from jaxscale.data.text import TextCorpus

END_OF_TEXT = "<|endoftext|>"
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """`encode` adds no special token; whoever writes documents ends each with `eos_id`, which opens each when read."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Hex; equal means equal ids for equal text."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str) -> Int32[np.ndarray, " t"]: ...

    def decode(self, ids: Integer[np.ndarray, " t"]) -> str: ...


@register
@dataclass(frozen=True)
class ByteTokenizer:
    """The 256 values of UTF-8 bytes. Id 0, the NUL character, ends a document and so may not occur in one."""

    name: ClassVar[str] = "bytes"
    fingerprint: ClassVar[str] = hashlib.sha256(b"jaxscale ByteTokenizer 1").hexdigest()
    vocab_size: ClassVar[int] = 256
    eos_id: ClassVar[int] = 0

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        """Raises DataError for text that holds NUL or half a surrogate pair."""
        try:
            ids = np.frombuffer(text.encode("utf-8"), np.uint8)
        except UnicodeEncodeError as error:
            raise DataError(
                f"character {error.start} is {text[error.start]!r}, which UTF-8 cannot hold; remove it, or read the "
                "file with errors='replace'."
            ) from error
        if "\0" in text:
            raise DataError(
                f"character {text.index(chr(0))} is NUL, which ends a document for ByteTokenizer; remove it from the "
                "text or train a tokenizer with jaxscale.data.train_bpe."
            )
        return ids.astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        """What an id stands for, wherever it stands."""
        return bytes([token if 0 <= token < 256 else 0xFF])

    def decode(self, ids: Integer[np.ndarray, " t"]) -> str:
        """Bytes that are not UTF-8, and ids of 256 and more (a padded vocabulary), come out as U+FFFD."""
        ids = np.asarray(ids)
        known = (ids >= 0) & (ids < 256)
        return np.where(known, ids, 0xFF).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    special: ClassVar[tuple[str, ...]] = ()

    def spans(self, text: str, *, aliased: bool = False) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, "t 2"]]:
        """Ids, and the character (from, to) that each is a byte of; there are no special tokens."""
        ids = self.encode(text)
        at = np.cumsum((ids & 0xC0) != 0x80) - 1  # a byte 10xxxxxx goes on with a character
        return ids, np.stack([at, at + 1], axis=1)


@register
@dataclass(frozen=True)
class HFTokenizer:
    """A `tokenizer.json` of Hugging Face `tokenizers` (`pip install 'jaxscale[hf]'`), loaded at first use.

    Fields:
      path: the file, or the folder that holds it.
      eos: the token that ends a document; None takes the first of `EOS_NAMES` that the vocabulary has.

    Special tokens written out in a text are encoded as ordinary text, so a document cannot end itself.
    """

    path: str
    eos: str | None = None

    @property
    def _file(self) -> Path:
        path = Path(self.path).expanduser()
        return path / "tokenizer.json" if path.is_dir() else path

    @cached_property
    def _content(self) -> str:
        try:
            return reading.read_text(self._file)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read the tokenizer {self._file} ({error}); give a tokenizer.json.") from error

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        library, content = _hf(), self._content
        with self._guarded("is not a tokenizer.json of Hugging Face tokenizers"):
            loaded = library.Tokenizer.from_str(content)
            loaded.encode_special_tokens = True
            loaded.no_truncation()
            loaded.no_padding()
            ids = loaded.get_vocab(with_added_tokens=True).values()
            if not ids or max(ids) >= 2**31 - 1:
                raise ValueError(f"its ids reach {max(ids)}" if ids else "its vocabulary is empty")
        return loaded

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Whatever the library raises inside, a panic of its Rust code included, as one sentence."""
        try:
            yield
        except BaseException as error:  # the library raises bare Exception, and a panic is not even that
            if isinstance(error, DataError) or not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise DataError(f"{self._file} {what} ({' '.join(str(error).split())[:300]}).") from error

    @cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        """The same, by which special tokens written out are special."""
        loaded = _hf().Tokenizer.from_str(self._tokenizer.to_str())
        loaded.encode_special_tokens = False
        return loaded

    @cached_property
    def _aliased(self) -> tokenizers.Tokenizer:
        """The same, whose special tokens are written as `alias(i)`, and what is spelled like one is a text as any."""
        told = json.loads(self._marked.to_str())
        names = {name: alias(i) for i, name in enumerate(self.special)}
        told["post_processor"] = None  # which would ask for them by name
        for token in told["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = told["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
        elif "vocab" in model:  # of Unigram, by id
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        loaded = _hf().Tokenizer.from_str(json.dumps(told))
        for name, other in names.items():
            if loaded.token_to_id(other) != self._tokenizer.token_to_id(name):
                raise DataError(f"{self._file} does not let {name} be told from a text that spells it; leave it out.")
        return loaded

    @property
    def name(self) -> str:
        return self._file.parent.name if self._file.name == "tokenizer.json" else self._file.stem

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.eos_id} {self._content}".encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may have holes

    @cached_property
    def eos_id(self) -> int:
        for name in (self.eos,) if self.eos is not None else EOS_NAMES:
            with self._guarded("has no such token"):
                found = self._tokenizer.token_to_id(name)
            if found is not None:
                return found
        named = None if self.eos is None else reading.clipped(self.eos)
        wanted = "end-of-text token that is known by name" if named is None else f"'{named}'"
        special = [reading.clipped(t.content) for t in self._tokenizer.get_added_tokens_decoder().values()]
        others = reading.clipped(near(named or "", special), 600)
        raise DataError(f"{self._file} has no {wanted}; name one with eos={others}")

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The texts of its special tokens, by id."""
        return tuple(t.content for _, t in sorted(self._tokenizer.get_added_tokens_decoder().items()) if t.special)

    @cached_property
    def _beside(self) -> dict[str, Any]:
        """What came with the file in its folder."""
        found: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            file = self._file.parent / name
            try:
                said = reading.parse_json(reading.read_text(file)) if file.is_file() else {}
            except (OSError, ValueError) as error:
                raise DataError(f"cannot read {file} ({error}); bring back the file as it came.") from error
            found |= {k: v for k, v in said.items() if v is not None} if isinstance(said, dict) else {}
        return found

    @property
    def opens_with_nothing(self) -> bool:
        """Whether its folder says that nothing stands before a text."""
        return self._beside.get("add_bos_token") is False

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """The ids that are put before a text, such as a model's "<s>".

        As `add_bos_token` of a `tokenizer_config.json` beside the file has it, else as the file's own rules do.
        """
        adds, bos = (self._beside.get(name) for name in ("add_bos_token", "bos_token"))
        bos = bos.get("content") if isinstance(bos, dict) else bos
        if adds is False:
            return ()
        if adds and isinstance(bos, str):
            found = self.token_to_id(bos)
            return () if found is None else (found,)
        with self._guarded("cannot encode a text"):
            plain = self._tokenizer.encode("a", add_special_tokens=False).ids
            whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return tuple(whole[:at])

    def token_of(self, id: int) -> str | None:
        """The text of a token, as the vocabulary has it."""
        return self._tokenizer.id_to_token(id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text, special ones included."""
        with self._guarded("has no such token"):
            return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        with self._guarded("cannot encode a text"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def spans(self, text: str, *, aliased: bool = False) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, "t 2"]]:
        """Ids, and the characters (from, to) that each is of; special tokens written out in the text are special.

        Args:
          text: any.
          aliased: special is what is written as `alias(i)`, of `special[i]`, and nothing else.
        """
        found = (self._aliased if aliased else self._marked).encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Integer[np.ndarray, " t"]) -> str:
        with self._guarded("cannot decode ids"):
            return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes | None:
        """What an id stands for wherever it stands; None where its neighbours have a say (SentencePiece's spaces)."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            known = [_BYTES.get(c) for c in piece]
            return piece.encode() if None in known else bytes(known)  # type: ignore[arg-type]
        byte = re.fullmatch("<0x([0-9A-F]{2})>", piece) if "ByteFallback" in self._decoders else None
        return None if byte is None else bytes.fromhex(byte[1])

    @cached_property
    def _decoders(self) -> tuple[str, ...]:
        """The kinds of the steps from pieces to text."""
        decoder = json.loads(self._content).get("decoder") or {}
        return tuple(step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step)


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def alias(i: int) -> str:
    """How special token `i` is written where its own spelling is text: between noncharacters, which no text holds."""
    return f"\ufdd4{i}\ufdd5"


def train_bpe(corpus: TextCorpus | Iterable[str], vocab_size: int, path: str | Path) -> HFTokenizer:
    """Trains a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) and writes it to `path`.

    Of a corpus only the train split is read. The only special token is `<|endoftext|>`, id 0.

    Raises DataError when vocab_size is under 257 (the bytes and the end), or `tokenizers` is not installed.
    """
    if vocab_size < 257:
        raise DataError(f"vocab_size={vocab_size} cannot hold the 256 bytes and an end-of-text token; use 257 or more.")
    library = _hf()
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = corpus.texts("train") if hasattr(corpus, "texts") else corpus
    bpe.train_from_iterator(texts, trainer)
    target = Path(path).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        bpe.save(str(target))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"cannot write the tokenizer to {target} ({error}); give a writable file.") from error
    return HFTokenizer(str(target))


def _alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes (Radford et al. 2019, GPT-2).

    Printable ones stand for themselves, the others for the characters from 256 on, in their order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _alphabet()


def _hf() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError(
            "this tokenizer needs the package 'tokenizers': pip install 'jaxscale[hf]', or use ByteTokenizer, which "
            "needs nothing."
        ) from error
    return tokenizers
