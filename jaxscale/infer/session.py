"""A run's model on its devices and an engine with its KV cache, reused by the next call of `generate`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxscale.data import Tokenizer
from jaxscale.infer.engine import Cached
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
        """Return a checkpoint's parameters on a layout; those of the last call if the arguments are the same.

        Args:
          step: the checkpoint's step.
          layout: the devices; `None` is one device.
          generation: whether they are sharded for decoding.
          weights: the weight format; `None` is as they are stored.
          read: reads them.
        """
        key = (step, layout, generation, weights)
        if self._model is None or self._model[0] != key:
            self._model = None  # free the old parameters before the new ones are read
            self._model = key, read()
        return self._model[1]

    def take_engine(self, loaded: Loaded, suits: Callable[[Engine], bool]) -> Engine | None:
        """Take the stored engine out of the session, if it has this model and `suits` accepts it, else `None`.

        It is not in the session until `keep_engine`: two generators may be open at once, and each needs its own engine.
        The engine of a run in training gets the parameters as they are now.

        Args:
          loaded: the model.
          suits: whether an engine can serve the call.
        """
        stored, self._engine = self._engine, None
        if stored is None:
            return None
        model, engine = stored
        if (model.graphdef, model.layout) != (loaded.graphdef, loaded.layout) or not suits(engine):
            return None
        if model.params is not loaded.params:
            if self.run.state is None or not isinstance(engine.stepper, Cached) or engine.busy:
                return None
            engine.stepper.replace_params(loaded.params)
        return engine

    def keep_engine(self, loaded: Loaded, engine: Engine) -> None:
        """Store an engine for the next call.

        Args:
          loaded: its model.
          engine: the engine.
        """
        if self.run.state is not None and isinstance(engine.stepper, Cached):  # the next step replaces the parameters
            engine.stepper.replace_params(None)
            loaded = loaded._replace(params=None)
        self._engine = loaded, engine
