"""Public names have docstrings that document every parameter.

Public are the names in each package's `__all__`, what configs can name, and the public methods of both. A method that
overrides one of its base class, or that implements one of a Protocol, may leave its parameters to that one's docstring,
where the names agree.
"""

import functools
import importlib
import inspect
import pathlib
import sys
import types

import pytest

import jaxscale
import pallas_kernels
from jaxscale.commands.settings import register_all
from jaxscale.config import registered
from jaxscale.config_docs import parse

OPS = sorted(path.parent.name for path in pathlib.Path(pallas_kernels.__file__).parent.glob("*/__init__.py"))
PACKAGES = (
    "jaxscale",
    *(f"jaxscale.{name}" for name in jaxscale._ROOMS),
    "pallas_kernels",
    *(f"pallas_kernels.{name}" for name in OPS),
)
OURS = ("jaxscale", "pallas_kernels")


def names_of(package: str) -> list[str]:
    """`__all__`, or what a module without one defines."""
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [n for n, o in vars(module).items() if getattr(o, "__module__", None) == package]
    return [name for name in listed if not name.startswith("_")]


@functools.cache
def public() -> dict[str, object]:
    """Classes and functions that are public, by the name that people use."""
    register_all()
    by_name = {f"{p}.{n}": getattr(importlib.import_module(p), n) for p in PACKAGES for n in names_of(p)}
    by_name |= {f"@{name}": obj for name, obj in registered().items()}
    once = {id(obj): name for name, obj in reversed(by_name.items())}
    return {
        name: obj
        for name, obj in by_name.items()
        if (inspect.isclass(obj) or inspect.isfunction(obj))
        and once[id(obj)] == name
        and (getattr(obj, "__module__", "") or "").startswith(OURS)
        and not isinstance(obj, types.GenericAlias)
    }


def parameters(obj: object) -> list[str]:
    """Names that a caller may pass, but for those of `**kwargs`."""
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return []
    many = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [name for name, parameter in signature.parameters.items() if parameter.kind not in many]
    return [name for name in named if name not in ("self", "cls") and not name.startswith("_")]


def documented(obj: object) -> set[str]:
    """Parameters that a docstring has; a class's are those of its bases and of `__init__` as well."""
    docs = [getattr(obj, "__doc__", None)]
    if isinstance(obj, type):
        docs = [vars(c).get("__doc__") for c in obj.__mro__]
        docs += [getattr(vars(c).get("__init__"), "__doc__", None) for c in obj.__mro__ if c is not object]
    return {name for doc in docs if isinstance(doc, str) for name in parse(doc).arguments}


@functools.cache
def protocols() -> list[tuple[type, frozenset[str]]]:
    """Every Protocol of ours, with its public methods."""
    public()  # imports all of our modules
    modules = [module for name, module in sys.modules.items() if name.startswith(OURS)]
    classes = {id(c): c for module in modules for c in vars(module).values() if getattr(c, "_is_protocol", False)}
    ours = [c for c in classes.values() if c.__module__.startswith(OURS)]
    methods = [(c, frozenset(n for n, m in vars(c).items() if n[0] != "_" and function_of(m))) for c in ours]
    return [(c, names) for c, names in methods if names]


def family(cls: type, method: str) -> list[object]:
    """The methods of this name of base classes, and of Protocols whose every method the class has."""
    bases = [vars(base)[method] for base in cls.__mro__[1:] if method in vars(base)]
    return bases + [
        vars(protocol)[method]
        for protocol, methods in protocols()
        if protocol is not cls and method in methods and all(hasattr(cls, name) for name in methods)
    ]


def function_of(member: object) -> object:
    """The function of a method of any kind; `None` of what is none."""
    inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    return inner if inspect.isfunction(inner) else None


def problems(name: str, obj: object) -> list[str]:
    """What the docstrings of an object and of its public methods lack."""
    lacking = []
    if not obj.__doc__:
        lacking.append(f"{name} has no docstring")
    elif missing := [p for p in parameters(obj) if p not in documented(obj)]:
        lacking.append(f"{name} does not document {', '.join(missing)}")
    for method, member in vars(obj).items() if isinstance(obj, type) else ():
        function = function_of(member)
        if method.startswith("_") or function is None:
            continue
        known = documented(function)
        for other in map(function_of, family(obj, method)):
            known |= documented(other) if other is not None else set()
        if not inspect.getdoc(getattr(obj, method)):
            lacking.append(f"{name}.{method} has no docstring")
        elif missing := [p for p in parameters(function) if p not in known]:
            lacking.append(f"{name}.{method} does not document {', '.join(missing)}")
    return lacking


def test_the_test_sees_what_is_missing():
    class Part:
        """A part.

        Args:
            one: the first.
        """

        def __init__(self, one: int, two: int): ...

        def run(self, steps: int): ...

        def stop(self, now: bool) -> None:
            """Stop."""

    assert problems("Part", Part) == [
        "Part does not document two",
        "Part.run has no docstring",
        "Part.stop does not document now",
    ]


@pytest.mark.parametrize("package", (*PACKAGES, "@"))
def test_public_names_are_documented(package):
    """`@` stands for what only configs can name."""
    own = [name for name in public() if package == ("@" if name[0] == "@" else name.rpartition(".")[0])]
    assert [line for name in own for line in problems(name, public()[name])] == []
