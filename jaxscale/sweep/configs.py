"""Settings of a trial, from the gin text of a sweep and the values of its axes."""

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
"""gin's config is global to the process, and several trials may start in its threads."""


@contextlib.contextmanager
def loaded(bindings: Sequence[str]) -> Iterator[None]:
    """Context in which these bindings are the active config; other threads of a sweep wait."""
    with _LOADING, gin_config.isolated():
        gin_config.load(bindings=bindings, partial=any(map(gin_config.lost, bindings)))
        yield


def settings_of(text: str) -> TrainConfig:
    """Return the settings of a run from its complete gin text."""
    with loaded([text]):
        return cast(TrainConfig, gin_config.call("train"))


class Base:
    """The config that all trials of a sweep have in common.

    Args:
      text: gin text of a run; bindings that only the sweep reads are allowed.
    """

    def __init__(self, text: str):
        self.text = text
        self.imports = "".join(f"{line}\n" for line in text.splitlines() if re.match(r"(import|from) ", line))
        self.names = [line.partition(" = ")[0] for line in text.splitlines() if " = " in line and line[0] != "#"]

    def bind(self, bindings: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
        """Return the settings of a trial, and the names of its bindings that nothing reads.

        Args:
          bindings: the value of each axis.

        Raises:
          ConfigError: a binding is unknown or of the wrong type, or the settings are not valid together.
        """
        lines = {name: f"{self.named(name)} = {gin_config.text(value)}" for name, value in split(bindings).items()}
        with loaded([self.text, *lines.values()]):
            config = cast(TrainConfig, gin_config.call("train"))
            unread = set(gin_config.unused())
        return config, [name for name in lines if self.named(name) in unread]

    def job_text(self, bindings: Mapping[str, Any]) -> str:
        """Return the complete gin text of a trial, which `settings_of` reads.

        Args:
          bindings: the value of each axis.

        Raises:
          ConfigError: as `bind`; or a part is a Python object that gin text cannot express.
        """
        text = gin_config.dumps("train", self.bind(bindings)[0].values())
        lost = gin_config.lost(text)
        if lost:
            raise ConfigError(
                f"{lost[0]} came from Python and cannot be written as gin text, from which every run of a sweep is "
                "built; register its class with jaxscale.config.register"
            )
        return self.imports + text

    def named(self, name: str) -> str:
        """Return a binding's name in the text, where text made from Python objects has a scope for each object.

        Args:
          name: the binding as `sweep.axes` names it.

        Raises:
          ConfigError: it is neither a parameter nor a macro of the text.
        """
        if "." not in name and name not in self.names:
            macros = [n for n in self.names if "." not in n]
            raise ConfigError(f"sweep.axes: there is no macro '{name}'{near(name, macros)}")
        scoped = [n for n in self.names if n.endswith(f"/{name}")]
        return scoped[0] if len(scoped) == 1 and name not in self.names else name


def differences(before: str, after: str) -> str:
    """Return a sentence with every binding that differs between two gin texts, with both values."""
    was, now = ({k: v for k, _, v in (line.partition(" = ") for line in t.splitlines())} for t in (before, after))
    keys = [k for k in sorted({**was, **now}) if was.get(k) != now.get(k)]
    each = [f"{key} was {was.get(key, 'not bound')} and is {now.get(key, 'not bound')}" for key in keys]
    return ", ".join(each) or "its lines are in another order"
