"""From a gin text and what its axes are bound to, to the settings of a run."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from jaxscale import config as gin_config
from jaxscale.errors import ConfigError, near
from jaxscale.step import TrainConfig
from jaxscale.sweep.axes import split

_LOADING = threading.RLock()
"""The loaded config is the process's, and several trials may start in its threads."""


@contextlib.contextmanager
def loaded(bindings: Sequence[str]) -> Iterator[None]:
    """While inside, these are the config that is in force; no other thread of a sweep loads one."""
    with _LOADING, gin_config.isolated():
        gin_config.load(bindings=bindings)
        yield


def settings_of(text: str) -> TrainConfig:
    """The settings of a run from gin text that describes the whole of it."""
    with loaded([text]):
        return cast(TrainConfig, gin_config.call("train"))


class Base:
    """What all trials of a sweep have in common.

    Args:
      text: gin text of a run; bindings that only the sweep reads do not matter.
    """

    def __init__(self, text: str):
        self.text = text
        self.imports = "".join(f"{line}\n" for line in text.splitlines() if re.match(r"(import|from) ", line))
        self.names = [line.partition(" = ")[0] for line in text.splitlines() if " = " in line and line[0] != "#"]

    def bind(self, bindings: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
        """The settings of a trial, and those of its bindings that nothing reads.

        Raises:
          ConfigError: a binding is unknown or of the wrong type, or what comes of them all is no run.
        """
        lines = {name: f"{self.named(name)} = {gin_config.text(value)}" for name, value in split(bindings).items()}
        with loaded([self.text, *lines.values()]):
            config = cast(TrainConfig, gin_config.call("train"))
            unread = set(gin_config.unused())
        return config, [name for name in lines if self.named(name) in unread]

    def job_text(self, bindings: Mapping[str, Any]) -> str:
        """gin text of a trial's whole run, from which `settings_of` makes the settings.

        Raises:
          ConfigError: as `bind`; or a part of it came from Python and has no words in gin.
        """
        text = gin_config.dumps("train", self.bind(bindings)[0].values())
        lost = gin_config.lost(text)
        if lost:
            raise ConfigError(
                f"{lost[0]} came from Python and cannot be written as gin, which every run of a sweep is told in; "
                "register its class with jaxscale.config.register"
            )
        return self.imports + text

    def named(self, name: str) -> str:
        """What the text itself calls a binding: a text made from objects gives each a scope of its own.

        Raises:
          ConfigError: it is neither a parameter nor a macro of the text.
        """
        if "." not in name and name not in self.names:
            macros = [n for n in self.names if "." not in n]
            raise ConfigError(f"sweep.axes: there is no macro '{name}'{near(name, macros)}")
        scoped = [n for n in self.names if n.endswith(f"/{name}")]
        return scoped[0] if len(scoped) == 1 and name not in self.names else name


def differences(before: str, after: str) -> str:
    """Every binding that two gin texts differ in, with what it was and is."""
    was, now = ({k: v for k, _, v in (line.partition(" = ") for line in t.splitlines())} for t in (before, after))
    keys = [k for k in sorted({**was, **now}) if was.get(k) != now.get(k)]
    each = [f"{key} was {was.get(key, 'not bound')} and is {now.get(key, 'not bound')}" for key in keys]
    return ", ".join(each) or "its lines are in another order"
