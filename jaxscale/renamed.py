"""Attributes of public classes whose names changed: the old name raises an error with the new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=type)

METHODS = {"for_texts_of": "for_length", "kept_width": "cache_width"}
"""Old names of methods that users' classes may define. A class with an old one would be used as if it had none."""


def renamed(**names: str) -> Callable[[T], T]:
    """Return a class decorator; reading an attribute by an old name then raises an error with the new name.

    Args:
      **names: old name -> new name.

    Raises:
      TypeError: when the class is decorated and has an own `__getattr__`, or still has an old name.
    """

    def decorate(cls: T) -> T:
        if "__getattr__" in vars(cls):
            raise TypeError(f"{cls.__name__} has a __getattr__, so its renamed attributes must be answered there")
        if still := [old for old in names if hasattr(cls, old)]:
            raise TypeError(f"{cls.__name__} still has the attribute '{still[0]}'")

        def __getattr__(self: object, name: str) -> object:
            if name not in names:
                return object.__getattribute__(self, name)  # raises as usual, also what a property raised inside
            message = f"'{type(self).__name__}' object has no attribute '{name}'; it is now called '{names[name]}'"
            raise AttributeError(message, name=name, obj=self)

        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
        return cls

    return decorate
