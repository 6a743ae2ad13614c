"""A family of models: how its config.json and ours say the same, and its table of tensors."""

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
    """One file of `jaxscale/interop/families` makes one of these.

    Args:
      model_type: as config.json says it, "llama".
      architecture: the class in transformers, "LlamaForCausalLM".
      model: from config.json's fields; raises CheckpointError for a value that it does not know.
      config: back, of a config that `model` might have given; what comes out is read again by `model`, and has to give
        the same, so that it need not check what it cannot say.
      table: a line per tensor (see `jaxscale.interop.maps`), or what gives them for a config.
      ignored: patterns of keys that hold nothing of the model; "{depth}" is the number of its layers.
      prefix: what keys of a checkpoint of the bare model lack.
    """

    model_type: str
    architecture: str
    model: Callable[[Fields], TransformerConfig]
    config: Callable[[TransformerConfig], dict[str, Any]]
    table: tuple[Map, ...] | Callable[[TransformerConfig], tuple[Map, ...]]
    ignored: tuple[str, ...] = ()
    prefix: str = ""

    def bind(self, config: TransformerConfig) -> list[Bound]:
        """The line of every leaf of a model.

        Raises:
          CheckpointError: leaves that no line is about.
        """
        infos = _infos(config)
        table = self.table if isinstance(self.table, tuple) else self.table(config)
        return bind(table, jax.tree.leaves(infos), config.runs)

    def differences(self, config: TransformerConfig, length: int) -> list[str]:
        """What of a config it cannot say, a sentence each.

        Raises:
          CheckpointError: it has no word for one of its parts, whatever the others are.
        """
        again = self.model(Fields(self.json(config, length), self.model_type))
        wanted, got = _said(config), _said(again)
        return [f"{k} = {_word(wanted[k])}" for k in wanted if wanted[k] != got[k]]

    def json(self, config: TransformerConfig, length: int) -> dict[str, Any]:
        """The config.json of a config.

        Args:
          config: one without `differences`.
          length: the most positions, for `max_position_embeddings`.
        """
        about = {"architectures": [self.architecture], "model_type": self.model_type, "torch_dtype": config.param_dtype}
        return {**about, "max_position_embeddings": length, **self.config(config)}


@functools.lru_cache(maxsize=8)
def _infos(config: TransformerConfig) -> Any:
    """A `TensorInfo` per parameter of a model, which is described and not made."""
    return abstract(lambda: config.make(nnx.Rngs(params=0)))[1]


_OWN = frozenset(
    ("memory", "scan", "attention", "overlap", "dropout", "dtype", "param_dtype", "stack", "parametrisation")
)
"""Of a config, how it is computed and trained."""

_LAYERS = frozenset(("blocks", "attention_layer", "mlp", "dense_mlp", "dense_layers", "mlp_every", "windows"))
"""Of a config, what its layers are made of; `layer_specs` has it layer by layer."""

_SIZES = ("width", "heads", "kv_heads", "head_dim", "hidden")


def same_model(a: TransformerConfig, b: TransformerConfig) -> bool:
    """Whether two configs are of models whose parameters mean the same, also where one has `blocks` and one has not."""
    return _said(a) == _said(b)


def _said(c: TransformerConfig) -> dict[str, Any]:
    """What a config says of the model's values, sizes worked out."""
    found = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name not in _OWN | _LAYERS}
    found |= {name: getattr(c.sizes, name) for name in _SIZES}
    found |= {"qk_norm": c.qk_norm_of, "attention_scale": c.score_scale, "positions": _values(c.positions)}
    layers = c.layer_specs()
    found["attention_layer"] = _once([layer.mixer for layer in layers])
    found["mlp"] = _once([_forward(layer.mlp, c.sizes.hidden) for layer in layers])
    found["windows"] = tuple(layer.window for layer in layers)
    if all(isinstance(layer.mlp, MixtureOfExperts) for layer in layers):
        found["hidden"] = None  # of no layer; experts say their own
    if all(w is None for w in found["windows"]):
        found["local_positions"] = None
    found["stack"] = c.stack.__name__
    found["parametrisation"] = c.parametrisation
    return found


def _once(parts: list[Any]) -> Any:
    """The part that all layers have, or those of each."""
    return parts[0] if all(part == parts[0] for part in parts) else tuple(parts)


def _forward(mlp: Any, hidden: int) -> Any:
    """A feed-forward without what training alone looks at."""
    if isinstance(mlp, MixtureOfExperts):
        return dataclasses.replace(mlp, hidden=mlp.hidden or hidden, balance_loss=0.0, z_loss=0.0)
    return mlp


def _values(positions: Any) -> Any:
    """Positions without the length that texts may reach here, which is no value of the model's."""
    scaling = getattr(positions, "scaling", None)
    if not isinstance(scaling, LongRopeScaling):
        return positions
    return dataclasses.replace(positions, scaling=dataclasses.replace(scaling, length=None))


def _word(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


def family_of(values: dict[str, Any], families: Sequence[Family], where: str) -> Family:
    """The family that a config.json names.

    Raises:
      CheckpointError: none that is known, or a checkpoint that is quantised.
    """
    known = {f.model_type: f for f in families}
    kind = values.get("model_type")
    if values.get("quantization_config"):
        how = values["quantization_config"]
        how = how.get("quant_method", "some way") if isinstance(how, dict) else how
        raise CheckpointError(f"{where} is quantised ({how}); bring the checkpoint in bfloat16 or float32")
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(f"{where} has the model_type {short(kind)}{near(short(kind), known)}")
    return known[kind]


def family_for(config: TransformerConfig, families: Sequence[Family], length: int, wanted: str | None = None) -> Family:
    """The first family that can say a config.

    Args:
      config: of the model.
      families: among which.
      length: the most positions.
      wanted: the `model_type` that is asked for, or `None`.

    Raises:
      CheckpointError: none can, or the one asked for cannot; with what the nearest cannot say.
    """
    known = {f.model_type: f for f in families}
    if wanted is not None and wanted not in known:
        raise CheckpointError(f"there is no family '{wanted}' to export to{near(wanted, known)}")
    tried: dict[str, list[str]] = {}
    refused = set()  # of which no more is known than the first reason: farther than any that can be compared
    for f in [known[wanted]] if wanted else families:
        try:
            tried[f.model_type] = f.differences(config, length)
        except CheckpointError as e:
            tried[f.model_type] = [str(e)]
            refused.add(f.model_type)
        if not tried[f.model_type]:
            return f
    nearest = min(tried, key=lambda name: (name in refused, len(tried[name])))
    which = f"'{nearest}'" if wanted else f"no family can say this model; the nearest, '{nearest}',"
    raise CheckpointError(f"{which} cannot say {', '.join(tried[nearest][:6])}")
