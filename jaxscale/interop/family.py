"""A family of Hugging Face models: conversion of its config.json to and from ours, and its table of tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.fields import Fields, short
from jaxscale.interop.maps import Bound, Map, bind
from jaxscale.layout import abstract
from jaxscale.models import TransformerConfig
from jaxscale.nn import LongRopeScaling, MixtureOfExperts


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models; each file of `jaxscale/interop/families` defines one.

    Args:
      model_type: its name in config.json, such as "llama".
      architecture: its class in transformers, such as "LlamaForCausalLM".
      model: makes our config from the fields of a config.json; raises CheckpointError for unknown values.
      config: makes fields of config.json from our config. It need not check what it cannot express, since its result
        is read again by `model` and compared.
      table: a `Map` per tensor (see `jaxscale.interop.maps`), or a function that returns them for a config.
      ignored: regular expressions of tensor names that are not part of the model; "{depth}" is its number of layers.
      prefix: prefix of tensor names that checkpoints of the model without its head lack.
      module: name of a tensor of the first module of multi-token prediction, with "{depth}"; a model whose files lack
        it has none, since `transformers` saves models without them. `None` if the family has no such modules.
      module_layers: beginning of the names of tensors in the blocks of those modules, with "{l}" for the module; by
        default module k is layer depth + k.
      left_out: regular expressions of tensor names of parts that our model lacks; an import lists what it left out.
    """

    model_type: str
    architecture: str
    model: Callable[[Fields], TransformerConfig]
    config: Callable[[TransformerConfig], dict[str, Any]]
    table: tuple[Map, ...] | Callable[[TransformerConfig], tuple[Map, ...]]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    module: str | None = None
    module_layers: str = ""
    left_out: tuple[str, ...] = ()

    def bind(self, config: TransformerConfig) -> list[Bound]:
        """Match every parameter of a model with its `Map`.

        Args:
          config: the model's config.

        Raises:
          CheckpointError: parameters without a `Map`.
        """
        infos = infos_of(config)
        table = self.table if isinstance(self.table, tuple) else self.table(config)
        return bind(table, jax.tree.leaves(infos), config.runs, self.module_layers)

    def differences(self, config: TransformerConfig, length: int) -> list[str]:
        """List the settings of a config that this family cannot express, as "name = value (it has another)".

        Args:
          config: the model's config.
          length: the most positions, for `max_position_embeddings`.

        Raises:
          CheckpointError: a part of the config has no form in this family's config.json.
        """
        again = self.model(Fields(self.json(config, length), self.model_type))
        return unlike(config, again)

    def json(self, config: TransformerConfig, length: int) -> dict[str, Any]:
        """Return the config.json of a config.

        Args:
          config: a config without `differences`.
          length: the most positions, for `max_position_embeddings`.
        """
        about = {"architectures": [self.architecture], "model_type": self.model_type, "torch_dtype": config.param_dtype}
        return {**about, "max_position_embeddings": length, **self.config(config)}


@functools.lru_cache(maxsize=8)
def infos_of(config: TransformerConfig) -> Any:
    """Return a tree with a `TensorInfo` per parameter of a model, without making arrays.

    Args:
      config: the model's config.
    """
    return abstract(lambda: config.make(nnx.Rngs(params=0)))[1]


_OWN = frozenset(
    (
        "memory", "scan", "attention", "overlap", "dropout", "attention_dropout", "dtype", "param_dtype", "stack",
        "parametrisation", "embed_gradient",
    )
)  # fmt: skip
"""Fields of a config about how the model is computed and trained, which do not change its values."""

_LAYERS = frozenset(("blocks", "attention_layer", "mlp", "dense_mlp", "dense_layers", "mlp_every", "windows"))
"""Fields of a config that `layer_specs` resolves for each layer."""

_SIZES = ("width", "heads", "kv_heads", "head_dim", "hidden")


def same_model(a: TransformerConfig, b: TransformerConfig) -> bool:
    """Whether two configs compute the same function of the same parameters, whether or not they use `blocks`.

    Args:
      a: a config.
      b: another config.
    """
    return _meaning(a) == _meaning(b)


def unlike(a: TransformerConfig, b: TransformerConfig) -> list[str]:
    """List the settings of a config that another one has otherwise, as "name = value (it has another)".

    Args:
      a: the config whose values are listed.
      b: another config.
    """
    expected, got = _meaning(a), _meaning(b)
    if type(expected["mlp"]) is not type(got["mlp"]) and None in (expected["hidden"], got["hidden"]):
        del expected["hidden"]  # follows from the kind of feed-forward
    return [line for name in expected for line in _apart(name, expected[name], got[name])]


def _apart(name: str, a: Any, b: Any) -> list[str]:
    """Return a line for each field in which two values differ; of two of a kind, for each field of theirs."""
    if a == b:
        return []
    if type(a) is type(b) and dataclasses.is_dataclass(a):
        fields = [f.name for f in dataclasses.fields(a)]
        return [line for f in fields for line in _apart(f"{name}.{f}", getattr(a, f), getattr(b, f))]
    return [f"{name} = {_name(a)} (it has {_name(b)})"]


def _meaning(c: TransformerConfig) -> dict[str, Any]:
    """The settings that determine a model's values, with sizes resolved."""
    meaning = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name not in _OWN | _LAYERS}
    meaning |= {name: getattr(c.sizes, name) for name in _SIZES}
    meaning |= {"qk_norm": c.qk_norm_of, "attention_scale": c.score_scale, "positions": _values(c.positions)}
    layers = c.layer_specs()
    meaning["attention_layer"] = _merged([_forward(layer.mixer) for layer in layers])
    meaning["mlp"] = _merged([_sized(_forward(layer.mlp), c.sizes.hidden) for layer in layers])
    meaning["windows"] = tuple(layer.window for layer in layers)
    meaning["rotary"] = _merged([layer.rotary for layer in layers])
    if all(isinstance(layer.mlp, MixtureOfExperts) for layer in layers):
        meaning["hidden"] = None  # not used by any layer: experts have their own
    if all(w is None for w in meaning["windows"]):
        meaning["local_positions"] = None
    meaning["stack"] = c.stack.__name__
    meaning["parametrisation"] = c.parametrisation
    return meaning


def _merged(parts: list[Any]) -> Any:
    """Return the part that all layers have in common, or a tuple of each layer's."""
    return parts[0] if all(part == parts[0] for part in parts) else tuple(parts)


_OWN_OF_LAYERS = {
    "balance_loss": 0.0, "sequence_balance": False, "z_loss": 0.0, "index_loss": 0.0, "dispatcher": None,
    "lends": False,
}  # fmt: skip
"""Settings of layers' own losses, of how devices send tokens and of caches, that no value depends on, with values for
none."""


def _forward(layer: Any) -> Any:
    """Return a mixer or feed-forward layer without settings that its output does not depend on."""
    none = {name: value for name, value in _OWN_OF_LAYERS.items() if hasattr(layer, name)}
    return dataclasses.replace(layer, **none) if none else layer


def _sized(mlp: Any, hidden: int) -> Any:
    """Return a feed-forward layer with the width of its experts."""
    return dataclasses.replace(mlp, hidden=mlp.hidden or hidden) if isinstance(mlp, MixtureOfExperts) else mlp


def _values(positions: Any) -> Any:
    """Return positions without LongRoPE's `length`, which is ours and not in config.json."""
    scaling = getattr(positions, "scaling", None)
    if not isinstance(scaling, LongRopeScaling):
        return positions
    return dataclasses.replace(positions, scaling=dataclasses.replace(scaling, length=None))


def _name(value: Any) -> str:
    """Return a class's or function's name, or a value with those fields that are not the default."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_name, value))}{',' * (len(value) == 1)})"
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return getattr(value, "__name__", None) or repr(value)
    fields = [f for f in dataclasses.fields(value) if f.name not in _OWN_OF_LAYERS]
    own = [(f.name, getattr(value, f.name)) for f in fields if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{name}={_name(x)}' for name, x in own)})"


def family_of(values: dict[str, Any], families: Sequence[Family], where: str) -> Family:
    """Return the family that a config.json names.

    Args:
      values: the content of config.json.
      families: the known families.
      where: the file, for messages.

    Raises:
      CheckpointError: the family is unknown.
    """
    known = {f.model_type: f for f in families}
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(f"{where} has the model_type {short(kind)}{near(short(kind), known)}")
    return known[kind]


def family_for(
    config: TransformerConfig, families: Sequence[Family], length: int, model_type: str | None = None
) -> Family:
    """Return the first family that can express a config.

    Args:
      config: the model's config.
      families: the families to try, in order.
      length: the most positions.
      model_type: try only the family with this name.

    Raises:
      CheckpointError: no family can express the config; the message lists what the nearest one cannot express.
    """
    known = {f.model_type: f for f in families}
    if model_type is not None and model_type not in known:
        raise CheckpointError(f"there is no family '{model_type}' to export to{near(model_type, known)}")
    tried: dict[str, list[str]] = {}
    refused = set()  # families that gave only one reason, so that they count as farther than any other
    for f in [known[model_type]] if model_type else families:
        try:
            tried[f.model_type] = f.differences(config, length)
        except CheckpointError as e:
            tried[f.model_type] = [str(e)]
            refused.add(f.model_type)
        if not tried[f.model_type]:
            return f
    nearest = min(tried, key=lambda name: (name in refused, len(tried[name])))
    which = f"'{nearest}'" if model_type else f"no family can express this model; the nearest, '{nearest}',"
    reasons = f"it: {tried[nearest][0]}" if nearest in refused else ", ".join(tried[nearest][:6])
    raise CheckpointError(f"{which} cannot express {reasons}")
