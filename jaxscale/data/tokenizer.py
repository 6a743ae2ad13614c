"""Tokenizers: bytes, and files of Hugging Face `tokenizers` with the `hf` extra."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Int32, Int64, Integer

from jaxscale import reading
from jaxscale.bucket_files import copied_folder
from jaxscale.buckets import BucketError, failure, is_url, normalized
from jaxscale.config import register
from jaxscale.errors import DataError, near
from jaxscale.working_copy import as_named, copy_of

if TYPE_CHECKING:
    import tokenizers

    from jaxscale.data.documents import TextCorpus

END_OF_TEXT = "<|endoftext|>"
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    `encode` adds no special tokens. A document in a token file ends with `eos_id`, which as an input opens the next.
    """

    @property
    def name(self) -> str:
        """Name of the tokenizer, for messages."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest in hexadecimal; tokenizers with equal ones encode all text equally."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the largest id plus 1."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""
        ...

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        """Return the token ids of a text, without special tokens.

        Args:
          text: the text.

        Raises:
          DataError: the text cannot be encoded.
        """
        ...

    def decode(self, ids: Integer[np.ndarray, " t"]) -> str:
        """Return the text of token ids.

        Args:
          ids: token ids.
        """
        ...


@register
@dataclass(frozen=True)
class ByteTokenizer:
    """A token for each of the 256 bytes, of UTF-8 text. Id 0, NUL, ends a document and may not occur in one."""

    name: ClassVar[str] = "bytes"
    fingerprint: ClassVar[str] = hashlib.sha256(b"jaxscale ByteTokenizer 1").hexdigest()
    vocab_size: ClassVar[int] = 256
    eos_id: ClassVar[int] = 0

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        """Return the bytes of a text.

        Args:
          text: the text.

        Raises:
          DataError: the text has a NUL character or a lone surrogate.
        """
        try:
            ids = np.frombuffer(text.encode("utf-8"), np.uint8)
        except UnicodeEncodeError as error:
            raise DataError(
                f"character {error.start} is {text[error.start]!r}, which UTF-8 cannot encode; remove it, or read the "
                "file with errors='replace'."
            ) from error
        if "\0" in text:
            raise DataError(
                f"character {text.index(chr(0))} is NUL, which ends a document for ByteTokenizer; remove it from the "
                "text or train a tokenizer with jaxscale.data.train_bpe."
            )
        return ids.astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token id; 0xFF for other ids.

        Args:
          token: the id.
        """
        return bytes([token if 0 <= token < 256 else 0xFF])

    def decode(self, ids: Integer[np.ndarray, " t"]) -> str:
        """Return the text of bytes; invalid UTF-8, and ids from 256 on (a padded vocabulary), become U+FFFD.

        Args:
          ids: token ids.
        """
        ids = np.asarray(ids)
        known = (ids >= 0) & (ids < 256)
        return np.where(known, ids, 0xFF).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    special: ClassVar[tuple[str, ...]] = ()

    def spans(self, text: str, *, aliased: bool = False) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, "t 2"]]:
        """Return the bytes of a text, and the span (from, to) of the character that each is a part of.

        Args:
          text: the text.
          aliased: not used, since there are no special tokens.
        """
        ids = self.encode(text)
        character = np.cumsum((ids & 0xC0) != 0x80) - 1  # a byte 10xxxxxx continues a character
        return ids, np.stack([character, character + 1], axis=1)


_BESIDE = ("special_tokens_map.json", "tokenizer_config.json")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Files with a chat template, beside a tokenizer."""


@register
@dataclass(frozen=True)
class HFTokenizer:
    """A `tokenizer.json` of Hugging Face `tokenizers` (`pip install 'jaxscale[hf]'`), loaded at first use.

    Special tokens written in a text are encoded as ordinary text, so that text cannot end a document.

    Args:
      path: the file, or its folder; also in a bucket.
      eos: the token that ends a document; `None` is the first of `EOS_NAMES` in the vocabulary.
    """

    path: str
    eos: str | None = None

    @cached_property
    def _file(self) -> Path:
        if is_url(self.path):
            url = normalized(self.path if self.path.endswith(".json") else f"{self.path}/tokenizer.json")
            folder, _, name = url.rpartition("/")
            try:
                return copied_folder(folder, [name, *_BESIDE, *CHAT_TEMPLATES]) / name
            except FileNotFoundError:
                return copy_of(url)
            except BucketError as error:
                raise failure(DataError, error) from None
            except OSError as error:
                raise DataError(f"cannot write a copy of {url} ({error.strerror}); set JAXSCALE_CACHE") from None
        path = Path(self.path).expanduser()
        return path / "tokenizer.json" if path.is_dir() else path

    @cached_property
    def content(self) -> str:
        """The text of the file.

        Raises:
          DataError: it cannot be read.
        """
        try:
            return reading.read_text(self._file)
        except (OSError, ValueError) as error:
            file = as_named(self._file)
            raise DataError(f"cannot read the tokenizer {file} ({error}); give a tokenizer.json.") from error

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        library, content = _hf(), self.content
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
    def _guarded(self, problem: str) -> Iterator[None]:
        """Turn whatever the library raises inside, panics of its Rust code included, into a `DataError`."""
        try:
            yield
        except BaseException as error:  # the library raises plain Exception, and a panic is only a BaseException
            if isinstance(error, DataError) or not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise DataError(f"{self._file} {problem} ({' '.join(str(error).split())[:300]}).") from error

    @cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        """The tokenizer that encodes special tokens in a text as special."""
        loaded = _hf().Tokenizer.from_str(self._tokenizer.to_str())
        loaded.encode_special_tokens = False
        return loaded

    @cached_property
    def _aliased(self) -> tokenizers.Tokenizer:
        """The tokenizer whose special token i is written `alias(i)`; its own text is encoded as ordinary text."""
        content = json.loads(self._marked.to_str())
        names = {name: alias(i) for i, name in enumerate(self.special)}
        content["post_processor"] = None  # it refers to special tokens by their text
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = content["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
        elif "vocab" in model:  # a Unigram model's is a list, by id
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        loaded = _hf().Tokenizer.from_str(json.dumps(content))
        for name, other in names.items():
            if loaded.token_to_id(other) != self._tokenizer.token_to_id(name):
                raise DataError(
                    f"{self._file} cannot distinguish the special token {name} from a text that spells it; remove it "
                    "from the text."
                )
        return loaded

    @property
    def folder(self) -> Path:
        """The folder of the file; of one in a bucket, the copy on this machine."""
        return self._file.parent

    @property
    def name(self) -> str:
        """Name of the folder of a `tokenizer.json`, or of another file."""
        return self._file.parent.name if self._file.name == "tokenizer.json" else self._file.stem

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the file and the eos, in hexadecimal."""
        return hashlib.sha256(f"{self.eos_id} {self.content}".encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus 1; some ids below may not exist."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def eos_id(self) -> int:
        """The id of `eos`."""
        for name in (self.eos,) if self.eos is not None else EOS_NAMES:
            with self._guarded("has no such token"):
                token = self._tokenizer.token_to_id(name)
            if token is not None:
                return token
        named = None if self.eos is None else reading.clipped(self.eos)
        missing = "end-of-text token with a known name" if named is None else f"token '{named}'"
        special = [reading.clipped(t.content) for t in self._tokenizer.get_added_tokens_decoder().values()]
        others = reading.clipped(near(named or "", special), 600)
        raise DataError(f"{self._file} has no {missing}; name one with eos={others}")

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The texts of its special tokens, by id."""
        return tuple(t.content for _, t in sorted(self._tokenizer.get_added_tokens_decoder().items()) if t.special)

    @cached_property
    def _beside(self) -> dict[str, Any]:
        """Settings in the other files of the tokenizer's folder."""
        settings: dict[str, Any] = {}
        for name in _BESIDE:
            file = self._file.parent / name
            try:
                content = reading.parse_json(reading.read_text(file)) if file.is_file() else {}
            except (OSError, ValueError) as error:
                raise DataError(f"cannot read {file} ({error}); restore the original file.") from error
            settings |= {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else {}
        return settings

    @property
    def opens_with_nothing(self) -> bool:
        """Whether `tokenizer_config.json` has `add_bos_token` false, so that no token precedes a text."""
        return self._beside.get("add_bos_token") is False

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """The ids that precede a text, such as a model's "<s>".

        `add_bos_token` in `tokenizer_config.json` decides, or else the post-processor in the tokenizer's file.
        """
        adds, bos = (self._beside.get(name) for name in ("add_bos_token", "bos_token"))
        bos = bos.get("content") if isinstance(bos, dict) else bos
        if adds is False:
            return ()
        if adds and isinstance(bos, str):
            token = self.token_to_id(bos)
            return () if token is None else (token,)
        with self._guarded("cannot encode a text"):
            plain = self._tokenizer.encode("a", add_special_tokens=False).ids
            whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return tuple(whole[:start])

    def token_of(self, id: int) -> str | None:
        """Return a token as it is written in the vocabulary, or `None` if there is none with this id.

        Args:
          id: the token id.
        """
        return self._tokenizer.id_to_token(id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or `None` if there is no such token.

        Args:
          token: the token as it is written in the vocabulary; it may be special.

        Raises:
          DataError: the library fails.
        """
        with self._guarded("has no such token"):
            return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        """Return the token ids of a text; special tokens in it are ordinary text.

        Args:
          text: the text.

        Raises:
          DataError: the text cannot be encoded.
        """
        with self._guarded("cannot encode a text"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: list[str]) -> list[Int32[np.ndarray, " t"]]:
        """Return the token ids of each text, as `encode` does; faster, and on several threads.

        Args:
          texts: the texts.

        Raises:
          DataError: one of them cannot be encoded.
        """
        with self._guarded("cannot encode a text"):
            encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
            return [np.array(one.ids, np.int32) for one in encode(texts, add_special_tokens=False)]

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle has: the file's content, and nothing that was made of it."""
        return {name: value for name, value in vars(self).items() if name in ("path", "eos", "content")}

    def spans(self, text: str, *, aliased: bool = False) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, "t 2"]]:
        """Return token ids, and the span of characters (from, to) of each; special tokens in the text are special.

        Args:
          text: the text.
          aliased: whether special token i is written as `alias(i)` instead of its own text.
        """
        encoded = (self._aliased if aliased else self._marked).encode(text, add_special_tokens=False)
        return np.array(encoded.ids, np.int32), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Integer[np.ndarray, " t"]) -> str:
        """Return the text of token ids, special tokens included.

        Args:
          ids: token ids.

        Raises:
          DataError: the ids cannot be decoded.
        """
        with self._guarded("cannot decode ids"):
            return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token, or `None` if they depend on its neighbours (SentencePiece's spaces).

        Args:
          token: the token id.
        """
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
        """Types of the steps that convert tokens to text."""
        decoder = json.loads(self.content).get("decoder") or {}
        return tuple(step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step)


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def alias(i: int) -> str:
    """Return another spelling of special token `i`: its number between noncharacters, which occur in no text.

    Args:
      i: index of the token in the tokenizer's `special`.
    """
    return f"\ufdd4{i}\ufdd5"


def train_bpe(corpus: TextCorpus | Iterable[str], vocab_size: int, path: str | Path) -> HFTokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in GPT-2) and write it to a file.

    The only special token is `<|endoftext|>`, id 0.

    Args:
      corpus: a corpus of texts, of which the train split is read; or texts.
      vocab_size: number of tokens, at least 257 (the bytes and the end of text).
      path: the file to write.

    Raises:
      DataError: `vocab_size` is below 257, `tokenizers` is not installed, or the file cannot be written.
    """
    if vocab_size < 257:
        raise DataError(
            f"vocab_size={vocab_size} is less than the 256 bytes and an end-of-text token; use 257 or more."
        )
    if is_url(path):
        raise DataError(f"{path} is in a bucket, and a tokenizer is written to a disk; name a file, and copy it later.")
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
    """Return the byte of each character of byte-level vocabularies (Radford et al. 2019, GPT-2).

    Printable bytes are written as themselves, the others as the characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _alphabet()


def _hf() -> ModuleType:
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
