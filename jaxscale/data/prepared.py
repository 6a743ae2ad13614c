"""A corpus that is already a token file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.packing import pack
from jaxscale.data.storage import TokenFile, read_meta
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError


@register(name="token_file")
@dataclass(frozen=True)
class PreparedTokens:
    """A folder made by `write_token_file` (or by another corpus's cache); both splits are in it.

    Fields:
      path: the folder.
      heldout: the fraction of its documents held out, by their names.
    """

    path: str
    heldout: float = 0.05

    @property
    def name(self) -> str:
        return read_meta(Path(self.path).expanduser())[0]["corpus"]

    def source(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Maps the file; `cache` is not used. Raises DataError when `tokenizer` is not the one that wrote it."""
        prepared = TokenFile(self.path)
        written_by = prepared.meta["tokenizer"]
        if tokenizer is not None and tokenizer.fingerprint != written_by["fingerprint"]:
            raise DataError(
                f"{self.path} was written with tokenizer '{written_by['name']}' ({written_by['vocab_size']} ids), not "
                f"with '{tokenizer.name}' ({tokenizer.vocab_size} ids); use that tokenizer or prepare the corpus again."
            )
        return pack(prepared.documents(split, self.heldout), packing, seq_len)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Those of the tokenizer that wrote the file; `None` where there is no file yet."""
        try:
            return TokenFile(self.path).vocab_size
        except DataError:
            return None
