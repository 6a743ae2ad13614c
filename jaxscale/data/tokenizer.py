"""Text to token ids and back: bytes in the core, Hugging Face `tokenizers` files with the `hf` extra."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from jaxtyping import Int32, Integer

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

    def decode(self, ids: Integer[np.ndarray, " t"]) -> str:
        """Bytes that are not UTF-8, and ids of 256 and more (a padded vocabulary), come out as U+FFFD."""
        ids = np.asarray(ids)
        known = (ids >= 0) & (ids < 256)
        return np.where(known, ids, 0xFF).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


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
            return self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the tokenizer {self._file} ({error}); give a tokenizer.json.") from error

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        library, content = _hf(), self._content
        try:
            loaded = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{self._file} is not a tokenizer.json of Hugging Face tokenizers ({error}).") from error
        loaded.encode_special_tokens = True
        loaded.no_truncation()
        loaded.no_padding()
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
            found = self._tokenizer.token_to_id(name)
            if found is not None:
                return found
        wanted = f"'{self.eos}'" if self.eos is not None else "end-of-text token that is known by name"
        special = [t.content for t in self._tokenizer.get_added_tokens_decoder().values()]
        raise DataError(f"{self._file} has no {wanted}; name one with eos={near(self.eos or '', special)}")

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Integer[np.ndarray, " t"]) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


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


def _hf():
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
