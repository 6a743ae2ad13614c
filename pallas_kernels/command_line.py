"""The parser of the kernels' command lines: `pallas_kernels.gate`, `pallas_kernels.tune` and those of the tests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from pallas_kernels.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors suggest the nearest option or choice."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, but first refuse an unknown option: argparse would name a required one in its place.

        Args:
          args: the words; those of the process by default.
          namespace: as of argparse.
        """
        words = sys.argv[1:] if args is None else args
        options = [o for action in self._actions if action.help != argparse.SUPPRESS for o in action.option_strings]
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in self._option_string_actions):
                self.error(f"there is no option {name}; see --help{did_you_mean(name, options)}")
        return super().parse_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = ", ".join(map(str, action.choices))
            hint = did_you_mean(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"'{value}' is not one of {known}{hint}")
