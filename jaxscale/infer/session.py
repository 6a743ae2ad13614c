"""What is kept of a run between calls of `generate`: its model where it runs, and an engine with its cache of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxscale.layout import Layout

if TYPE_CHECKING:
    from jaxscale.infer.engine import Engine
    from jaxscale.infer.loaded import Loaded
    from jaxscale.train import Run

Tree = Any


@dataclasses.dataclass(eq=False)
class Session:
    """The model of a run as it was read last, and the engine that last generated with it; one of each at a time.

    A layout counts with its devices, so that asking for the same one on other devices reads the model anew.

    Args:
      run: of which it is (`Run.session`).
    """

    run: Run
    _model: tuple[Any, Tree] | None = None
    _engine: tuple[Loaded, Engine] | None = None

    def params(self, step: int, layout: Layout | None, generation: bool, read: Callable[[], Tree]) -> Tree:
        """A checkpoint's parameters on a layout, read unless they are the last that were.

        Args:
          step, layout: of which checkpoint, and where.
          generation: laid out for steps of few tokens.
          read: gives them.
        """
        wanted = (step, layout, generation)
        if self._model is None or self._model[0] != wanted:
            self._model = None  # not both at once
            self._model = wanted, read()
        return self._model[1]

    def take_engine(self, found: Loaded, suits: Callable[[Engine], bool]) -> Engine | None:
        """The engine that was kept, if it has this model and suits; while it is used it is nobody else's.

        Others' tokens would be lost otherwise: two generators may be open at once.
        """
        kept, self._engine = self._engine, None
        if kept is None:
            return None
        model, engine = kept
        same = model.params is found.params and (model.graphdef, model.layout) == (found.graphdef, found.layout)
        return engine if same and suits(engine) else None

    def keep_engine(self, found: Loaded, engine: Engine) -> None:
        """Keeps an engine for the next call."""
        self._engine = found, engine
