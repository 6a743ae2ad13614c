"""What one run offers: its folder, training, and text from its model.

Generation and planning are imported when they are first used: training starts sooner without them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxscale.errors import ConfigError, DataError
from jaxscale.interop.companions import GENERATION
from jaxscale.step import TrainConfig
from jaxscale.train.fit import fit as train
from jaxscale.train.loop import Services
from jaxscale.train.run import HF, RunFolder, read_config

__all__ = ["Run", "fit", "read_config"]


class Run(RunFolder):
    """A run folder, and what is done with it afterwards.

    `config.gin` rebuilds the run's settings, `run.json` says where and with what it ran, `metrics.jsonl` has a line
    a step, `checkpoints/` its states, `loss.png` its picture.

    Args:
      path: the folder.
      config: its settings, when they are at hand; else they are read from `config.gin`.
      state: the last state, when it is in memory.

    Attributes:
      stopped_by: the signal, such as "SIGTERM", that stopped its training in this process before the last step.
    """

    def choice(self, but: Collection[str] = ()) -> dict[str, Any]:
        """How those who made an imported checkpoint choose tokens: settings for `generate`, of its generation config.

        Args:
          but: settings that are not wanted.

        Raises:
          DataError: one of the others is out of its range.
        """
        from jaxscale.infer.sampling import Sampling

        found = {} if self.imported is None else self.imported.choice
        found = {name: value for name, value in found.items() if name not in but}
        try:
            Sampling(**found)
        except ConfigError as e:
            said = str(e).removeprefix("Sampling.")
            raise DataError(
                f"{self.path / HF / GENERATION}: {said}; mend it there, with --accept-edits, or pass it yourself"
            ) from None
        return found

    @functools.cached_property
    def session(self) -> Any:
        """The model and the engine that `generate` reuses; see `jaxscale.infer.session.Session`."""
        from jaxscale.infer.session import Session

        return Session(self)

    def sample(
        self, prompt: str = "", tokens: int = 200, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
    ) -> str:
        """Continues a text; see `jaxscale.infer.sample_text`."""
        from jaxscale.infer import sample_text

        return sample_text(self, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)

    def generate(self, prompts: Any, **options: Any) -> Any:
        """Continues a prompt, or several side by side; see `jaxscale.infer.generate`."""
        from jaxscale.infer import generate

        return generate(self, prompts, **options)

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """Continues a prompt piece by piece, as the text comes; see `jaxscale.infer.stream`."""
        from jaxscale.infer import stream

        return stream(self, prompt, **options)

    def chat(self, messages: Sequence[Any], **options: Any) -> Any:
        """What the assistant says next in a conversation; see `jaxscale.infer.chat`."""
        from jaxscale.infer import chat

        return chat(self, messages, **options)


def _of(folder: RunFolder) -> Run:
    run = Run(folder.path, folder.config, folder.state)
    run.stopped_by = folder.stopped_by
    return run


def _sample(folder: RunFolder, prompt: str) -> str:
    """Text behind a prompt, no longer together than what the model was trained on."""
    left = folder.config.seq_len - len(folder.prompt_ids(prompt))
    return _of(folder).sample(prompt, tokens=max(1, min(400, left)))


def _out_of_memory(error: Exception, config: TrainConfig) -> Exception | None:
    from jaxscale.plan.remedies import is_out_of_memory, out_of_memory

    return out_of_memory(error, config) if is_out_of_memory(error) else None


@functools.wraps(train)
def fit(config: TrainConfig | None = None, **options: Any) -> Run:  # noqa: D103  (that of `jaxscale.train.fit.fit`)
    return _of(train(config, services=Services(_sample, _out_of_memory), **options))
