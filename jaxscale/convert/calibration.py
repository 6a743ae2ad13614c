"""Statistics of the inputs of a layer's matrices over calibration batches, one layer in memory at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.convert.recipes import Inputs
from jaxscale.data import Batch, Corpus, Loader
from jaxscale.errors import ConfigError, DataError
from jaxscale.layout import Layout
from jaxscale.layout.tensors import Tree, path_name
from jaxscale.models import ModelConfig, TransformerConfig
from jaxscale.models.soft_prompt import with_prompt
from jaxscale.nn import Part, Weight, as_weight
from jaxscale.parallel import Arithmetic
from jaxscale.step import TrainConfig

SAMPLE = 128
"""Tokens whose inputs are kept as they are."""


class Book:
    """The inputs of matrices that were recorded while a layer was traced.

    Args:
      real: 1.0 for tokens, 0.0 for padding, (b, s).
      sample: how many tokens' inputs to keep.
    """

    def __init__(self, real: Array, sample: int):
        self._real, self._sample = real, sample
        self._seen: list[Array] = []
        self.place: dict[str, int] = {}
        self.sums: list[dict[str, Array]] = []

    def add(self, name: str, x: Float[Array, "b s ..."]) -> None:
        """Record the inputs of a matrix; matrices with the same inputs share a place.

        Those of a matrix that is used several times (`Transformer.shared`) are added up.

        Args:
          name: of the matrix.
          x: its inputs.
        """
        for n, other in enumerate(self._seen):
            if other is x:
                self.place[name] = n
                return
        again = self.place.get(name)
        if again is None:
            self.place[name] = len(self._seen)
            self._seen.append(x)
        else:
            self._seen[again] = x
        flat = x.astype(jnp.float32).reshape(*x.shape[:2], -1) * self._real[..., None]
        flat = flat.reshape(-1, flat.shape[-1])
        second = jnp.matmul(flat.T, flat, precision=jax.lax.Precision.HIGHEST)
        size = jnp.abs(flat)
        some = flat[np.linspace(0, len(flat) - 1, min(self._sample, len(flat))).astype(int)]
        sums = {"second": second, "mean": size.sum(0), "largest": size.max(0, initial=0.0), "sample": some}
        if again is None:
            self.sums.append(sums)
        else:
            self.sums[again] = _both(self.sums[again], sums)

    def add_experts(self, name: str, chosen: Array, x: Float[Array, "..."]) -> None:
        """Record the inputs of a matrix of several experts: of each, those of its tokens.

        Args:
          name: of the matrix.
          chosen: the experts of each token, (b, s, experts).
          x: (b, s, n), or (experts, b, s, n).
        """
        masks = jnp.moveaxis(chosen * self._real[..., None], -1, 0)  # (experts, b, s)
        if x.ndim == 3:
            x = jnp.broadcast_to(x, (len(masks), *x.shape))

        def one(pair: tuple[Array, Array]) -> dict[str, Array]:
            own = Book(pair[0], self._sample)
            own.add(name, pair[1])
            return own.sums[0]

        self.place[name] = len(self.sums)
        self._seen.append(x)
        self.sums.append(jax.lax.map(one, (masks, x)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed(Weight):
    """A kernel whose inputs are recorded.

    Args:
      kernel: the kernel.
      name: of the matrix.
      book: where its inputs are recorded.
    """

    kernel: Any
    name: str = dataclasses.field(metadata={"static": True})
    book: Book = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return tuple(self.kernel.shape)

    def dense(self, dtype: Any = None) -> Array:
        """See `Weight`."""
        return as_weight(self.kernel).dense(dtype)

    def matmul(
        self, x: Float[Array, "..."], axes: tuple[str, ...], contracted: tuple[int, ...], arithmetic: Arithmetic
    ) -> Float[Array, "..."]:
        """See `Weight`."""
        self.book.add(self.name, x)
        return as_weight(self.kernel).matmul(x, axes, contracted, arithmetic)

    def of_experts(self, chosen: Any, inputs: Any) -> None:
        """See `Weight`."""
        self.book.add_experts(self.name, chosen(), inputs())


def observable(model: ModelConfig) -> ModelConfig:
    """Return the config of the same model whose layers are applied one by one, without anything around products.

    Args:
      model: a model config.

    Raises:
      ConfigError: it is not a `Transformer`.
    """
    if not isinstance(model, TransformerConfig):
        raise ConfigError(
            f"recipes with calibration need the layers of a Transformer, and this is a {type(model).__name__}; use "
            "RoundToNearest or HQQ"
        )
    return dataclasses.replace(
        model.dropless(), scan=False, memory="none", overlap=(), dropout=0.0, attention_dropout=0.0
    )  # fmt: skip


def batches_of(config: TrainConfig, data: Corpus | None, rows: int, batch: int, widest: int) -> list[Batch]:
    """Return calibration batches from the training part of a corpus, in the run's order, after the soft prompt if any.

    Args:
      config: the run's settings.
      data: a corpus in place of the run's.
      rows: rows of `config.seq_len` tokens.
      batch: rows of a batch, a divisor of `rows`.
      widest: the most inputs of a matrix.

    Raises:
      DataError: the corpus has fewer rows, or no token ids; or the tokens are fewer than a matrix has inputs.
      ConfigError: `batch` does not divide `rows`.
    """
    if rows < 1 or batch < 1:
        raise ConfigError(f"{rows} calibration rows in batches of {batch}: both must be whole numbers above 0")
    if rows % batch:
        raise ConfigError(f"{rows} calibration rows are not whole batches of {batch} rows; use a multiple of {batch}")
    corpus = config.data if data is None else data
    source = corpus.source(config.tokenizer, seq_len=config.seq_len, split="train", packing=config.packing)
    if len(source) < rows:
        raise DataError(
            f"'{source.name}' has {len(source)} rows of {config.seq_len} tokens, too few for {rows} calibration rows; "
            f"use at most {len(source)} rows, or other data"
        )
    if rows * config.seq_len < widest:
        raise DataError(
            f"{rows} calibration rows have {rows * config.seq_len} tokens, fewer than the {widest} inputs of the "
            f"widest matrix; use at least {-(-widest // config.seq_len)} rows"
        )
    loader = Loader(source, batch, config.seed)
    batches = [loader.batch_at(n) for n in range(rows // batch)]
    if "tokens" not in batches[0]:
        raise DataError(
            f"'{source.name}' has rows without token ids, which calibration needs; use RoundToNearest or HQQ"
        )
    names = ("tokens", "positions", "segment_ids")
    out = []
    for b in batches:
        read: tuple[Any, ...] = tuple(b.get(k) if config.segments or k == "tokens" else None for k in names)
        if isinstance(config.model, TransformerConfig):
            read = with_prompt(config.model, *read)
        out.append({k: np.asarray(x) for k, x in zip(names, read, strict=True) if x is not None})
    return out


class Calibration:
    """Hidden states of calibration batches between two layers, in host memory, and the programs that move them on.

    Args:
      graphdef: the structure of an `observable` model.
      infos: a `TensorInfo` for each parameter.
      batches: from `batches_of`.
      layout: where layers are computed; `None` is one device.
    """

    def __init__(self, graphdef: nnx.GraphDef[Any], infos: Tree, batches: list[Batch], layout: Layout | None):
        self._graphdef, self._infos, self._batches, self._layout = graphdef, infos, batches, layout
        self._runs = list(infos["runs"])
        self._hidden: list[np.ndarray] = []
        self._place: dict[int, dict[str, int]] = {}
        self.tokens = sum(int(_real(b).sum()) for b in batches)

    def begin(self, rest: Tree) -> None:
        """Compute the inputs of the first layer.

        Args:
          rest: the parameters outside of layers.
        """
        with self._in_force():
            self._hidden = [np.asarray(self._before(rest, b)) for b in self._batches]

    def inputs(self, run: int, repeat: int, params: Tree, names: list[str]) -> dict[str, Inputs]:
        """Return the statistics of the inputs of a layer's matrices; those without any are left out.

        Those of experts' matrices have a leading dimension of experts.

        Args:
          run: number of the run of blocks.
          repeat: of its group.
          params: the group's parameters, with a leading dimension of 1.
          names: paths of the matrices within the run.
        """
        total: list[dict[str, Array]] = []
        with self._in_force():
            for batch, x in zip(self._batches, self._hidden, strict=True):
                sums = self._observe(run, tuple(names), params, x, batch, jnp.int32(repeat))
                total = [_both(a, b) for a, b in zip(total, sums, strict=True)] if total else sums
        places = self._place[run]
        out = [Inputs(t["second"] / self.tokens, t["mean"] / self.tokens, t["largest"], t["sample"]) for t in total]
        return {name: out[n] for name, n in places.items()}

    def advance(self, run: int, repeat: int, params: Tree) -> None:
        """Compute the outputs of a layer, the inputs of the next.

        Args:
          run: see `inputs`.
          repeat: see `inputs`.
          params: the group's parameters; matrices may be `Weight`s.
        """
        with self._in_force():
            pairs = zip(self._batches, self._hidden, strict=True)
            self._hidden = [np.asarray(self._apply(run, params, x, b, jnp.int32(repeat))) for b, x in pairs]

    def _in_force(self) -> contextlib.AbstractContextManager[Any]:
        return self._layout if self._layout is not None else contextlib.nullcontext()

    def _model(self, rest: Tree, run: int | None = None, params: Tree = None) -> Any:
        """Return the model with these parameters; the others are infos without arrays."""
        of_runs = {name: params if n == run else self._infos["runs"][name] for n, name in enumerate(self._runs)}
        return nnx.merge(self._graphdef, {**self._infos, **rest, "runs": of_runs})

    @functools.cached_property
    def _before(self) -> Any:
        return jax.jit(lambda rest, b: self._model(rest).begin(b["tokens"], b.get("positions")))

    @functools.cached_property
    def _apply(self) -> Any:
        return jax.jit(self._within, static_argnums=0)

    def _within(self, run: int, params: Tree, x: Array, batch: Batch, repeat: Array) -> Array:
        model = self._model({}, run, params)
        context = model.context(
            batch["tokens"].shape[1], positions=batch.get("positions"), segment_ids=batch.get("segment_ids")
        )
        return model.runs[run](x, context, Part(repeat[None]))[0]

    @functools.cached_property
    def _observe(self) -> Any:
        def observe(
            run: int, names: tuple[str, ...], params: Tree, x: Array, batch: Batch, repeat: Array
        ) -> list[dict[str, Array]]:
            book = Book(_real(batch), -(-SAMPLE // len(self._batches)))

            def observed(path: tuple[Any, ...], kernel: Array) -> Any:
                name = path_name(path)
                return Observed(kernel, name, book) if name in names else kernel

            self._within(run, jax.tree_util.tree_map_with_path(observed, params), x, batch, repeat)
            self._place[run] = book.place
            return book.sums

        return jax.jit(observe, static_argnums=(0, 1))


def _both(a: dict[str, Array], b: dict[str, Array]) -> dict[str, Array]:
    """Return the sums of two parts of the tokens together."""
    largest = jnp.maximum(a["largest"], b["largest"])
    sums = {name: a[name] + b[name] for name in ("second", "mean")}
    return {**sums, "largest": largest, "sample": jnp.concatenate([a["sample"], b["sample"]], -2)}


def _real(batch: Batch) -> Any:
    segments = batch.get("segment_ids")
    if segments is None:
        return np.ones(batch["tokens"].shape, np.float32)
    return (segments != 0).astype(np.float32)


def widest_of(infos: Tree) -> int:
    """Return the most inputs of a matrix that can be stored in a weight format.

    Args:
      infos: a `TensorInfo` for each parameter.
    """
    sizes = [math.prod(i.shape[d] for d in i.contracted) for i in jax.tree.leaves(infos) if i.contracted is not None]
    return max(sizes, default=0)
