"""What travels with the weights: the files beside them, and what they say of tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale import reading
from jaxscale.data import HFTokenizer
from jaxscale.errors import DataError
from jaxscale.interop.fields import is_number, read_json, short
from jaxscale.interop.links import check_links

CONFIG = "config.json"
GENERATION = "generation_config.json"
FILES = (
    CONFIG,
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Copied as they are."""
CHOICE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""How a token is chosen, in the words of generation configs and of `Sampling`."""


def copy_companions(folder: Path, out: Path, but: Sequence[str] = ()) -> list[str]:
    """Copies those of `FILES` that are there, byte for byte; returns their names.

    Raises:
      CheckpointError: one is a link out of the folder.
    """
    check_links(folder)
    out.mkdir(parents=True, exist_ok=True)
    found = [name for name in FILES if name not in but and (folder / name).is_file()]
    for name in found:
        shutil.copyfile(folder / name, out / name)
    return found


class Companions:
    """What the files beside a checkpoint say of its tokens.

    Args:
      folder: that holds them.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name) if (self.folder / name).is_file() else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; empty where there is none."""
        return self._json(CONFIG)

    @cached_property
    def tokenizer(self) -> HFTokenizer:
        """Its tokenizer; what ends a text is what `tokenizer_config.json` says.

        Raises:
          DataError: it came without a tokenizer.json.
        """
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f"{self.folder} has no tokenizer.json, so that there is no text, only token ids; bring one "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(DIR) writes it)"
            )
        return HFTokenizer(str(file.absolute()), eos=self._token("eos_token"))

    def _token(self, name: str) -> str | None:
        """A special token's text, in either form that they write."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            said = self._json(file).get(name)
            said = said.get("content") if isinstance(said, dict) else said
            if said and not isinstance(said, str):
                raise DataError(f"{self.folder / file} has {name} = {short(said)}, which is no token's text")
            if said:
                return said
        return None

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the generation config's, else config.json's, else the tokenizer's own.

        Raises:
          DataError: none is told.
        """
        for name in (GENERATION, CONFIG):
            said = self._json(name).get("eos_token_id")
            if said is None:
                continue
            ids = said if isinstance(said, list) else [said]
            if not ids or not all(map(reading.is_whole, ids)):
                raise DataError(f"{self.folder / name} has eos_token_id = {short(said)}, which is no token's id")
            return tuple(ids)
        return (self.tokenizer.eos_id,)

    @cached_property
    def choice(self) -> dict[str, Any]:
        """How the generation config has tokens chosen, by the names of `Sampling`; what it leaves out is not there.

        Of one that says `"do_sample": false` only the penalty is for its texts.
        """
        said = self._json(GENERATION)
        names = CHOICE if said.get("do_sample") is not False else CHOICE[-1:]
        found = {name: said[name] for name in names if said.get(name) is not None}
        strange = next((n for n, v in found.items() if not is_number(v) or (n == "top_k" and v != int(v))), None)
        if strange is not None:
            raise DataError(f"{self.folder / GENERATION} has {strange} = {short(found[strange])}, which is no number")
        if found.get("top_k") in (0, -1):  # which are all
            del found["top_k"]
        return found

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Ids that open a text, as the family was trained: what the tokenizer puts before one."""
        return self.tokenizer.opening

    def prompt_ids(self, text: str) -> np.ndarray:
        """The ids that a prompt starts from; an empty one needs something to go on from, and gets an opening or an end.

        Raises:
          DataError: there is no tokenizer, or an empty prompt and nothing to open with.
        """
        ids = [*self.opening, *self.tokenizer.encode(text).tolist()]
        if not ids:
            bos = self._json(CONFIG).get("bos_token_id")
            ids = [bos if reading.is_whole(bos) else self.end_ids[0]]
        return np.asarray(ids, np.int32)
