"""`Run` and `fit`: train a model, and generate from it.

Generation and planning are imported on first use, so that training starts sooner.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale.errors import ConfigError, DataError
from jaxscale.interop.companions import GENERATION
from jaxscale.step import TrainConfig
from jaxscale.train.fit import fit as train
from jaxscale.train.loop import Services
from jaxscale.train.run import HF, RunFolder, read_config

if TYPE_CHECKING:
    from jaxscale.infer.session import Session

__all__ = ["Run", "fit", "read_config"]


class Run(RunFolder):
    """A run folder that can also generate text.

    `config.gin` rebuilds the run's settings, `run.json` records versions, hardware and data, `metrics.jsonl` has one
    line per step, `checkpoints/` the training states, `loss.png` the loss curve.

    Args:
      path: the folder.
      config: the run's settings; read from `config.gin` if omitted.
      state: the last training state, if it is in memory.

    Attributes:
      stopped_by: the signal, such as "SIGTERM", that stopped training in this process before the last step.
    """

    def choice(self, but: Collection[str] = ()) -> dict[str, Any]:
        """Return the sampling settings of an imported checkpoint's generation config, as arguments for `generate`.

        Args:
          but: names of settings to leave out.

        Raises:
          DataError: a setting that is not left out is out of range.
        """
        from jaxscale.infer.sampling import Sampling

        settings = {} if self.imported is None else self.imported.choice
        settings = {name: value for name, value in settings.items() if name not in but}
        try:
            Sampling(**settings)
        except ConfigError as e:
            fault = str(e).removeprefix("Sampling.")
            raise DataError(
                f"{self.path / HF / GENERATION}: {fault}; edit the file with --accept-edits, or pass another value"
            ) from None
        return settings

    @functools.cached_property
    def session(self) -> Session:
        """The loaded model and engine that `generate`, `stream` and `chat` reuse; see `jaxscale.infer.session`."""
        from jaxscale.infer.session import Session

        return Session(self)

    def sample(
        self, prompt: str = "", tokens: int = 200, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
    ) -> str:
        """Continue a text with this run's model; see `jaxscale.infer.sample_text`.

        Args:
          prompt: the text to continue.
          tokens: how many tokens to generate at most.
          temperature: divides the logits; 0 takes the most likely token.
          top_k: sample from this many most likely tokens only; `None` for all.
          seed: of the random choice.

        Returns:
          the prompt and its continuation.
        """
        from jaxscale.infer import sample_text

        return sample_text(self, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)

    def generate(self, prompts: Any, **options: Any) -> Any:
        """Generate completions of a prompt, or of several in one batch; see `jaxscale.infer.generate`.

        Args:
          prompts: a text, an array of token ids, or a list of either.
          **options: see `jaxscale.infer.generate`.
        """
        from jaxscale.infer import generate

        return generate(self, prompts, **options)

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """Generate a completion and yield its text piece by piece; see `jaxscale.infer.stream`.

        Args:
          prompt: a text, or an array of token ids.
          **options: see `jaxscale.infer.stream`.
        """
        from jaxscale.infer import stream

        return stream(self, prompt, **options)

    def rewards(self, prompts: Any, answers: Any, **options: Any) -> Any:
        """Return the rewards that this run's reward model gives to answers; see `jaxscale.infer.rewards`.

        Args:
          prompts: texts, or lists of messages.
          answers: an answer to each prompt.
          **options: see `jaxscale.infer.rewards`.
        """
        from jaxscale.infer.heads import rewards

        return rewards(self, prompts, answers, **options)

    def classify(self, texts: Any, **options: Any) -> Any:
        """Return the probabilities of classes, or predicted numbers, of texts; see `jaxscale.infer.classify`.

        Args:
          texts: the texts.
          **options: see `jaxscale.infer.classify`.
        """
        from jaxscale.infer.heads import classify

        return classify(self, texts, **options)

    def chat(self, messages: Sequence[Any], **options: Any) -> Any:
        """Generate the assistant's next message of a conversation; see `jaxscale.infer.chat`.

        Args:
          messages: the messages so far, each with a `role` and `content`.
          **options: see `jaxscale.infer.chat`.
        """
        from jaxscale.infer import chat

        return chat(self, messages, **options)


def _run(folder: RunFolder) -> Run:
    run = Run(folder.path, folder.config, folder.state)
    run.stopped_by = folder.stopped_by
    return run


def _sample(folder: RunFolder, prompt: str) -> str:
    """Continue a prompt, up to the length of the sequences that the model was trained on."""
    remaining = folder.config.seq_len - len(folder.prompt_ids(prompt))
    return _run(folder).sample(prompt, tokens=max(1, min(400, remaining)))


def _out_of_memory(error: Exception, config: TrainConfig) -> Exception | None:
    from jaxscale.plan.remedies import is_out_of_memory, out_of_memory

    return out_of_memory(error, config) if is_out_of_memory(error) else None


@functools.wraps(train)
def fit(config: TrainConfig | None = None, **options: Any) -> Run:  # noqa: D103  (that of `jaxscale.train.fit.fit`)
    return _run(train(config, services=Services(_sample, _out_of_memory), **options))
