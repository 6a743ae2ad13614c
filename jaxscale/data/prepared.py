"""A corpus from a token file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.fetching import opened
from jaxscale.data.packing import pack
from jaxscale.data.storage import TokenFile, read_meta
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError


@register(name="token_file")
@dataclass(frozen=True)
class PreparedTokens:
    """A folder written by `write_token_file`, or the cache of another corpus; it has both splits.

    Args:
      path: the folder, or its URL in a bucket (`s3://` or `gs://`), of which the chunks that are read are fetched.
      heldout: fraction of its documents held out, chosen by their names.
    """

    path: str
    heldout: float = 0.05

    @property
    def name(self) -> str:
        """Name of the corpus in the file."""
        return read_meta(opened(self.path)[0])[0]["corpus"]

    def source(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return packed rows of one split, memory-mapped; `cache` is not used.

        Raises:
          DataError: another tokenizer wrote the file, or it is damaged.
        """
        return pack(self.prepared(tokenizer).documents(split, self.heldout), packing, seq_len)

    def prepared(self, tokenizer: Tokenizer | None = None, cache: str | Path | None = None) -> TokenFile:
        """Return the token file.

        Args:
          tokenizer: the tokenizer that must have written it; `None` is any.
          cache: not used.

        Raises:
          DataError: another tokenizer wrote the file, or it is damaged.
        """
        prepared = TokenFile(self.path)
        written_by = prepared.meta["tokenizer"]
        if tokenizer is not None and tokenizer.fingerprint != written_by["fingerprint"]:
            raise DataError(
                f"{self.path} was written with tokenizer '{written_by['name']}' ({written_by['vocab_size']} ids), not "
                f"with '{tokenizer.name}' ({tokenizer.vocab_size} ids); use that tokenizer or prepare the corpus again."
            )
        return prepared

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the vocabulary's size of the tokenizer that wrote the file; `None` if there is no file yet.

        Args:
          tokenizer: not used.
        """
        try:
            return TokenFile(self.path).vocab_size
        except DataError:
            return None
