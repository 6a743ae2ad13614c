"""Prompts to learn from, as corpora (`train.data`): a list, JSON lines, or sums to compute."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.records import UserRecords
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt and what its reward needs to know.

    Args:
      text: the prompt.
      answer: what the reward compares with; any value.
    """

    text: str
    answer: Any = None


class Prompts:
    """Base of corpora of prompts; a subclass defines `prompts`.

    Attributes:
      name: for the log and run.json.
    """

    name: ClassVar[str] = "prompts"

    def prompts(self) -> Sequence[Prompt]:
        """Return all prompts.

        Raises:
          DataError: there is none, or one cannot be read.
        """
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return a digest of the prompts and answers, in hexadecimal."""
        return hashlib.sha256(repr([(p.text, p.answer) for p in self.prompts()]).encode()).hexdigest()

    def source(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return packed rows of prompts followed by their answers, for supervised training.

        Args:
          tokenizer: turns texts into token ids.
          seq_len: tokens of a row.
          split: "train" or "heldout".
          packing: as of `train.packing`.
          cache: a folder for token ids.

        Raises:
          DataError: a prompt has no answer.
        """
        prompts = self.prompts()
        if missing := [p.text for p in prompts if p.answer is None]:
            raise DataError(
                f"supervised training on {self.name} needs an answer for each prompt, and {missing[0]!r} has none; for "
                "reinforcement learning use jaxscale rl"
            )
        texts: Any = [{"text": f"{p.text}{p.answer}"} for p in prompts]
        return UserRecords(texts, field="text").source(
            tokenizer, seq_len=seq_len, split=split, packing=packing, cache=cache
        )


@register(name="prompt_list")
@dataclasses.dataclass(frozen=True)
class PromptList(Prompts):
    """Prompts from a config or from Python.

    Args:
      texts: the prompts.
      answers: the answer of each, or none at all.

    Raises:
      ConfigError: there is no prompt, or not an answer for each.
    """

    texts: tuple[str, ...]
    answers: tuple[Any, ...] = ()
    name: ClassVar[str] = "prompt_list"

    def __post_init__(self) -> None:
        if isinstance(self.texts, str) or not self.texts or not all(isinstance(t, str) for t in self.texts):
            raise ConfigError("prompts must be a list of texts, at least one")
        object.__setattr__(self, "texts", tuple(self.texts))
        object.__setattr__(self, "answers", tuple(self.answers))
        if self.answers and len(self.answers) != len(self.texts):
            raise ConfigError(f"there are {len(self.answers)} answers for {len(self.texts)} prompts; give one for each")

    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts with their answers."""
        return [Prompt(t, self.answers[i] if self.answers else None) for i, t in enumerate(self.texts)]


@register(name="prompt_files")
@dataclasses.dataclass(frozen=True)
class PromptFiles(Prompts):
    """Prompts from JSON lines `{"prompt": ..., "answer": ...}`.

    Args:
      path: a `.jsonl` file.
      prompt: the field of the prompt.
      answer: the field of the answer, which may be missing.
    """

    path: str
    prompt: str = "prompt"
    answer: str = "answer"
    name: ClassVar[str] = "prompt_files"

    def prompts(self) -> Sequence[Prompt]:
        """Read the file.

        Raises:
          DataError: it cannot be read, has no line, or a line has no prompt.
        """
        return _read(self.path, self.prompt, self.answer)


@functools.lru_cache(4)
def _read(path: str, prompt: str, answer: str) -> tuple[Prompt, ...]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"the prompts {path} cannot be read ({e}); give a UTF-8 file of JSON lines") from None
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get(prompt), str):
            raise DataError(f"{path}, line {number} is not a JSON object with a text in its field '{prompt}'")
        out.append(Prompt(row[prompt], row.get(answer)))
    if not out:
        raise DataError(f"{path} has no prompt; write one JSON object in each line")
    return tuple(out)


@register(name="arithmetic")
@dataclasses.dataclass(frozen=True)
class Arithmetic(Prompts):
    """Sums such as `17+5=`, with their results as answers.

    Args:
      largest: the largest number; all pairs from 0 on are prompts, in a fixed random order.

    Raises:
      ConfigError: `largest` is out of its range.
    """

    largest: int = 9
    name: ClassVar[str] = "arithmetic"

    def __post_init__(self) -> None:
        if not isinstance(self.largest, int) or not 1 <= self.largest <= 999:
            raise ConfigError(f"arithmetic.largest = {self.largest!r}: must be a whole number from 1 to 999")

    def prompts(self) -> Sequence[Prompt]:
        """Return all sums."""
        count = self.largest + 1
        pairs = np.random.default_rng(0).permutation(count * count)
        return [Prompt(f"{p // count}+{p % count}=", str(p // count + p % count)) for p in pairs.tolist()]
