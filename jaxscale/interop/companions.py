"""Companions: the files beside a checkpoint's weights (tokenizer, generation config, chat template)."""

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
"""Files that are copied with a model."""
CHOICE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling settings that generation configs and `Sampling` have in common."""


def copy_companions(folder: Path, out: Path, but: Sequence[str] = ()) -> list[str]:
    """Copy the companion files (`FILES`) that a folder has.

    Args:
      folder: the checkpoint's folder.
      out: where to copy them; made if necessary.
      but: names to leave out.

    Returns:
      the names of the copied files.

    Raises:
      CheckpointError: a file is a link out of the folder.
    """
    check_links(folder)
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in FILES if name not in but and (folder / name).is_file()]
    for name in names:
        shutil.copyfile(folder / name, out / name)
    return names


class Companions:
    """Reads the companion files of a checkpoint.

    Args:
      folder: the checkpoint's folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name) if (self.folder / name).is_file() else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json; `{}` if there is none."""
        return self._json(CONFIG)

    @cached_property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer, with the end-of-text token of `tokenizer_config.json`.

        Raises:
          DataError: there is no tokenizer.json.
        """
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f"{self.folder} has no tokenizer.json, so only token ids can be used, no text; add one "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(DIR) writes it)"
            )
        return HFTokenizer(str(file.absolute()), eos=self._token("eos_token"))

    def _token(self, name: str) -> str | None:
        """Return a special token's text, which may be written as a string or as an object with `content`."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = self._json(file).get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token and not isinstance(token, str):
                raise DataError(f"{self.folder / file} has {name} = {short(token)}, which is not a token's text")
            if token:
                return token
        return None

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion: the generation config's, else config.json's, else the tokenizer's.

        Without a tokenizer there may be none: sequences of ids then end at `max_tokens`.

        Raises:
          DataError: a file names something else than ids.
        """
        for name in (GENERATION, CONFIG):
            value = self._json(name).get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not ids or not all(map(reading.is_whole, ids)):
                raise DataError(f"{self.folder / name} has eos_token_id = {short(value)}, which is not a token id")
            return tuple(ids)
        return (self.tokenizer.eos_id,) if (self.folder / "tokenizer.json").is_file() else ()

    @cached_property
    def choice(self) -> dict[str, Any]:
        """The generation config's sampling settings, by the names of `Sampling`; only those that it has.

        With `"do_sample": false`, only the repetition penalty applies.
        """
        values = self._json(GENERATION)
        names = CHOICE if values.get("do_sample") is not False else CHOICE[-1:]
        settings = {name: values[name] for name in names if values.get(name) is not None}
        wrong = next((n for n, v in settings.items() if not is_number(v) or (n == "top_k" and v != int(v))), None)
        if wrong is not None:
            raise DataError(f"{self.folder / GENERATION} has {wrong} = {short(settings[wrong])}, which is no number")
        if settings.get("top_k") in (0, -1):  # both mean all tokens
            del settings["top_k"]
        return settings

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """Token ids that the tokenizer puts before a text."""
        return self.tokenizer.opening

    def prompt_ids(self, text: str) -> np.ndarray:
        """Return the int32 token ids of a prompt; an empty one becomes the begin-of-text or else the end-of-text id.

        Args:
          text: the prompt.

        Raises:
          DataError: there is no tokenizer, or the prompt is empty and no file names an id to start from.
        """
        ids = [*self.opening, *self.tokenizer.encode(text).tolist()]
        if not ids:
            bos = self._json(CONFIG).get("bos_token_id")
            ids = [bos if reading.is_whole(bos) else self.end_ids[0]]
        return np.asarray(ids, np.int32)
