"""A run's model on its devices and a batching engine with its KV cache, reused by the next call of `generate`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxscale.data import Tokenizer
from jaxscale.layout import Layout
from jaxscale.nn import WeightFormat

if TYPE_CHECKING:
    from jaxscale.infer.engine import Engine
    from jaxscale.infer.loaded import Loaded
    from jaxscale.run import Run

Tree = Any


@dataclasses.dataclass(eq=False)
class Session:
    """The parameters that a run read last, and the engine that last generated with them; one of each at a time.

    Layouts are compared with their devices: the same mesh on other devices reads the parameters again.

    Args:
      run: the run (`Run.session`).
    """

    run: Run
    _model: tuple[Any, Tree] | None = None
    _engine: tuple[Loaded, Engine] | None = None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, read once.

        Raises:
          DataError: an imported checkpoint came without one.
        """
        return self.run.tokenizer

    def params(
        self,
        step: int,
        layout: Layout | None,
        generation: bool,
        weights: WeightFormat | None,
        read: Callable[[], Tree],
    ) -> Tree:
        """A checkpoint's parameters on a layout; reuses those of the last call where the arguments are the same.

        Args:
          step: the checkpoint's.
          layout: the devices; `None` is one device.
          generation: whether they are laid out for decoding.
          weights: the form in which they are kept.
          read: reads them.
        """
        wanted = (step, layout, generation, weights)
        if self._model is None or self._model[0] != wanted:
            self._model = None  # not both at once
            self._model = wanted, read()
        return self._model[1]

    def take_engine(self, found: Loaded, suits: Callable[[Engine], bool]) -> Engine | None:
        """Hands out the stored engine if it has this model and `suits` accepts it, else `None`.

        The session forgets it until `keep_engine`: two generators may be open at once, and each needs its own.
        """
        kept, self._engine = self._engine, None
        if kept is None:
            return None
        model, engine = kept
        same = model.params is found.params and (model.graphdef, model.layout) == (found.graphdef, found.layout)
        return engine if same and suits(engine) else None

    def keep_engine(self, found: Loaded, engine: Engine) -> None:
        """Stores an engine for the next call."""
        self._engine = found, engine
