"""What configs may set, for people to look up: every registered name and its settings, read from the docstrings.

`jaxscale settings` prints it and the documentation site shows it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping

from jaxscale.config_choices import choices
from jaxscale.config_registry import BY_ID, registered
from jaxscale.config_text import Inexpressible, literal
from jaxscale.config_types import parameters
from jaxscale.errors import ConfigError, near

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "Training": ("jaxscale.step.config", "jaxscale.train"),
    "Objectives and losses": (
        "jaxscale.step.objective", "jaxscale.step.loss", "jaxscale.step.objectives", "jaxscale.step.value_losses",
    ),
    "Algorithms": (
        "jaxscale.step.backprop", "jaxscale.step.algorithms", "jaxscale.step.weight_ema", "jaxscale.parallel.wires",
    ),
    "Fine-tuning": (
        "jaxscale.step.lora", "jaxscale.step.bit_adapters", "jaxscale.step.unfreeze", "jaxscale.step.scales",
        "jaxscale.step.soft_prompt", "jaxscale.step.mixlora",
    ),
    "Guards, snapshots and the watchdog": (
        "jaxscale.step.guards", "jaxscale.step.snapshots", "jaxscale.step.watchdog",
    ),
    "Trackers": ("jaxscale.train.trackers", "jaxscale.step.histograms", "jaxscale.step.flip_rate"),
    "Layout": ("jaxscale.layout", "jaxscale.parallel.partial_sums"),
    "Models": ("jaxscale.models",),
    "Model parts": ("jaxscale.nn", "jaxscale.parallel.dispatch"),
    "Optimizers": ("jaxscale.optim",),
    "Learning-rate schedules": ("jaxscale.optim.schedules",),
    "Parametrisations": ("jaxscale.optim.mup",),
    "Data and tokenizers": ("jaxscale.data",),
    "Recipes of quantize": ("jaxscale.convert.recipes",),
    "Generation and serving": ("jaxscale.infer",),
    "Reinforcement learning": ("jaxscale.rl",),
    "Sweeps": ("jaxscale.sweep",),
    "Your own": ("",),
}  # fmt: skip
"""Title -> prefixes of the modules that register its members; the longest prefix decides."""

_HEADINGS = ("Args", "Arguments", "Attributes", "Fields", "Returns", "Yields", "Raises", "Example", "Examples", "Note")
_ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:(?: (.*))?$")


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A docstring in Google style, taken apart.

    Args:
        summary: The first paragraph, on one line.
        description: Everything below it up to the first section, and what is below the sections.
        sections: Heading -> name -> text: `sections["Args"]["lr"]`. Several names with one text have it each.
    """

    summary: str
    description: str
    sections: Mapping[str, Mapping[str, str]]

    @property
    def arguments(self) -> dict[str, str]:
        """Text by parameter, from `Args` and what is called otherwise."""
        return {name: text for title in _HEADINGS[3::-1] for name, text in self.sections.get(title, {}).items()}


def parse(doc: str | None) -> Docstring:
    """Take a docstring apart; without one, everything is empty."""
    lines = inspect.cleandoc(doc or "").splitlines()
    prose: list[str] = []
    sections: dict[str, dict[str, str]] = {}
    entries: dict[str, list[str]] = {}
    heading, indent = "", 0
    for line in lines:
        bare = line.strip()
        depth = len(line) - len(line.lstrip())
        if depth == 0 and bare.endswith(":") and bare[:-1] in _HEADINGS:
            heading, indent, entries = bare[:-1], 0, {}
            sections[heading] = {}
        elif heading and (depth or not bare):
            indent = indent or depth
            entry = _ENTRY.match(bare) if depth == indent else None
            if entry:
                entries = {name.lstrip("*"): [entry[2] or ""] for name in entry[1].split(", ")}
            elif bare:
                entries = entries or {"": []}
                for text in entries.values():
                    text.append(bare)
            sections[heading] |= {name: " ".join(text).strip() for name, text in entries.items()}
        else:
            heading = ""
            prose.append(line)
    summary, _, description = "\n".join(prose).strip().partition("\n\n")
    return Docstring(" ".join(summary.split()), _unwrapped(description.strip("\n")), sections)


def _unwrapped(text: str) -> str:
    """Text with a line for each paragraph; indented lines and lists stay as they are."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(" ".join(p.split()) if re.fullmatch(r"\w.*(\n\w.*)*", p) else p for p in paragraphs)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a registered object.

    Args:
        name: As configs write it behind the object's name; `**changes` stands for any setting of what is made.
        type: The annotation as the code has it; empty where there is none.
        default: In gin's words; `None` where one must be given.
        meaning: From the docstring; empty where it says nothing.
        choices: Names of the registered objects that it accepts; empty where there are fewer than 2 or very many.
    """

    name: str
    type: str
    default: str | None
    meaning: str
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Described:
    """A registered object and its settings.

    Args:
        name: What configs call it.
        family: One of `FAMILIES`.
        path: Module and name in Python.
        summary: What it is, one line.
        description: More about it, with the paper or specification where there is one.
        settings: Its fields, in order.
        raises: Error -> when.
    """

    name: str
    family: str
    path: str
    summary: str
    description: str
    settings: tuple[Setting, ...]
    raises: Mapping[str, str]


def described() -> list[Described]:
    """Everything that configs can name, by family and name."""
    everything = [describe(name) for name in registered()]
    return sorted(everything, key=lambda item: (list(FAMILIES).index(item.family), item.name.lower()))


def describe(name: str) -> Described:
    """A registered object by its name.

    Raises:
        ConfigError: Nothing is registered under this name.
    """
    obj = registered().get(name)
    if obj is None:
        raise ConfigError(f"there is no registered name '{name}'{near(name, registered(), bindings=True)}")
    doc = parse(obj.__doc__)
    meanings, accepted = _meanings(obj), choices(obj)
    settings = tuple(
        Setting(
            "**" * (p.kind is p.VAR_KEYWORD) + "*" * (p.kind is p.VAR_POSITIONAL) + field,
            "" if p.annotation is p.empty else _annotation(p.annotation),
            _default(obj, field, p),
            meanings.get(field, ""),
            accepted.get(field, ()),
        )
        for field, p in parameters(obj).items()
    )
    module = getattr(obj, "__module__", "")
    prefixes = [(len(prefix), family) for family, some in FAMILIES.items() for prefix in some if _below(module, prefix)]
    path = f"{module}.{getattr(obj, '__qualname__', name)}"
    return Described(
        name, max(prefixes)[1], path, doc.summary, doc.description, settings, doc.sections.get("Raises", {})
    )


def _below(module: str, prefix: str) -> bool:
    return not prefix or module == prefix or module.startswith(f"{prefix}.")


def _meanings(obj: Callable[..., object]) -> dict[str, str]:
    """Text by parameter; a class says again only what its bases do not say."""
    if not isinstance(obj, type):
        return parse(obj.__doc__).arguments
    texts: dict[str, str] = {}
    for cls in reversed(obj.__mro__):
        for doc in (vars(cls).get("__doc__"), getattr(vars(cls).get("__init__"), "__doc__", None)):
            own = parse(doc).arguments if isinstance(doc, str) and cls is not object else {}
            texts |= {name: text for name, text in own.items() if name not in texts or not text.startswith("see `")}
    return texts


def _annotation(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(obj: Callable[..., object], field: str, parameter: inspect.Parameter) -> str | None:
    value = parameter.default
    if dataclasses.is_dataclass(obj):
        for declared in dataclasses.fields(obj):
            if declared.name == field and declared.default_factory is not dataclasses.MISSING:
                value = declared.default_factory()
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return ""
    return None if value is parameter.empty else words(value)


def words(value: object) -> str:
    """A default as a config would write it: `@EightBit()`, `@Snapshots(every=0)`, `'float32'`."""

    def other(part: object, path: tuple[str, ...]) -> str:
        if entry := BY_ID.get(id(part)):
            return f"@{entry.name}"
        if entry := BY_ID.get(id(type(part))):
            changed = ", ".join(f"{name}={words(new)}" for name, new in _changed(part))
            return f"@{entry.name}({changed})"
        raise Inexpressible

    try:
        return literal(value, other, ())
    except Inexpressible:
        return getattr(value, "__name__", None) or repr(value)


def _changed(value: object) -> Iterator[tuple[str, object]]:
    """Fields of an object that are not at their defaults."""
    for name, parameter in parameters(type(value)).items():
        now = getattr(value, name, parameter.default)
        if words(now) != _default(type(value), name, parameter):
            yield name, now
