"""Samples of prompts by the run's engine, and the arrays of a batch that the objective needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.data import Batch
from jaxscale.data.prompts import Prompt
from jaxscale.infer.sampling import Sampling
from jaxscale.rl.config import RLConfig
from jaxscale.rl.first import on_first
from jaxscale.rl.rewards import RewardError, Sample
from jaxscale.training_session import TrainingSession


def seeds(seed: int, step: int, kind: int, n: int) -> list[int]:
    """Return n seeds of the engine, functions of the run's seed and the step alone.

    Args:
      seed: the run's.
      step: the step.
      kind: of the random stream: the round of sampling, or the turn.
      n: number of seeds.
    """
    state = np.random.SeedSequence([seed, step, kind]).generate_state(n, np.uint32)
    return [int(x) for x in state]


class Sampler:
    """Samples prompts with a session's parameters as they are now.

    Args:
      session: the session.
      settings: of reinforcement learning.
    """

    def __init__(self, session: TrainingSession, settings: RLConfig):
        self.session, self.settings = session, settings
        self.layout = settings.sampler_layout(session.config)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids.

        Args:
          prompt: the prompt.

        Raises:
          ConfigError: `train.seq_len` does not hold it and `rl.max_tokens`.
        """
        ids: list[int] = self.session.run.prompt_ids(prompt.text).tolist()
        self.settings.check_length(prompt.text, len(ids), self.session.config)
        return ids

    def sample(self, prompts: Sequence[Prompt], seeds: Sequence[int], *, greedy: bool = False) -> list[Sample]:
        """Return a sample of each prompt, over all its turns.

        Args:
          prompts: the prompts.
          seeds: the seed of each.
          greedy: take the likeliest token.
        """
        pending = [_Pending(p, self.ids(p)) for p in prompts]
        active = list(range(len(pending)))
        for turn in range(self.settings.turns):
            self._turn([pending[i] for i in active], [seeds[i] + turn & 0xFFFFFFFF for i in active], greedy)
            if turn + 1 < self.settings.turns:
                active = [i for i in active if self._answered(pending[i])]
            if not active:
                break
        return [p.sample() for p in pending]

    def _turn(self, pending: Sequence[_Pending], seeds: Sequence[int], greedy: bool) -> None:
        s, temperature = self.settings, 0.0 if greedy else 1.0
        left = self.session.config.seq_len + 1
        sampling = [
            Sampling(min(s.max_tokens, left - len(p.ids)), temperature, seed=seed, stop=s.stop)
            for p, seed in zip(pending, seeds, strict=True)
        ]
        made = self.session.sample([p.ids for p in pending], sampling=sampling, rows=s.rows, layout=self.layout)
        for p, completion in zip(pending, made, strict=True):
            p.add(completion)

    def _answered(self, pending: _Pending) -> bool:
        """Append what the tool returns; whether the sequence goes on."""
        tool = self.settings.tool
        assert tool is not None
        name = getattr(tool, "__name__", type(tool).__name__)

        def call() -> str | None:
            try:
                text = tool(pending.sample())
            except Exception as e:
                raise RewardError(f"the tool {name} raised {type(e).__name__}: {e}") from e
            if text is not None and not isinstance(text, str):
                raise RewardError(f"the tool {name} returned {text!r}; return a text, or None to end the sequence")
            return text

        text = on_first(call)
        if text is None:
            return False
        ids = [int(i) for i in self.session.run.tokenizer.encode(text)]
        if len(pending.ids) + len(ids) > self.session.config.seq_len:  # not even one new token fits
            return False
        pending.answer(text, ids)
        return True


class _Pending:
    """A sequence that is being sampled."""

    def __init__(self, prompt: Prompt, ids: list[int]):
        self.prompt, self.ids = prompt, list(ids)
        self.generated, self.logprobs = [False] * len(ids), [0.0] * len(ids)
        self.text, self.finished = "", "length"

    def add(self, completion: Any) -> None:
        self.ids += completion.ids
        self.generated += [True] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.text, self.finished = self.text + completion.text, completion.finished

    def answer(self, text: str, ids: Sequence[int]) -> None:
        self.ids += ids
        self.generated += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.text += text

    def sample(self) -> Sample:
        lists = tuple(self.ids), tuple(self.generated), tuple(self.logprobs)
        return Sample(self.prompt.text, self.text, self.prompt.answer, *lists, self.finished)


def batch_of(samples: Sequence[Sample], advantages: Sequence[float], seq_len: int) -> Batch:
    """Return the arrays of `PolicyGradient.inputs`; positions after a sequence's end have weight 0.

    Args:
      samples: a sequence for each row.
      advantages: of each.
      seq_len: S.
    """
    shape = len(samples), seq_len
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights, logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, s in enumerate(samples):
        n = len(s.ids) - 1
        tokens[row, :n], targets[row, :n] = s.ids[:-1], s.ids[1:]
        weights[row, :n], logprobs[row, :n] = s.generated[1:], s.logprobs[1:]
    rows = np.asarray(advantages, np.float32)
    return {"tokens": tokens, "targets": targets, "weights": weights, "logprobs": logprobs, "advantages": rows}
