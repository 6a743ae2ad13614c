"""The loop of reinforcement learning: sample, reward, step; all of it a function of the seed and the step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxscale.data.order import Shuffle, derive
from jaxscale.data.prompts import Prompt, PromptList, Prompts
from jaxscale.errors import ConfigError, RunError
from jaxscale.layout import Layout
from jaxscale.rl.config import RLConfig, config_of
from jaxscale.rl.first import on_first
from jaxscale.rl.rewards import RewardError, Sample, rewards_of
from jaxscale.rl.rollout import Sampler, batch_of, seeds
from jaxscale.run import Run
from jaxscale.step import TrainConfig
from jaxscale.step.objectives.sampled import Sampled
from jaxscale.step.prepare import Prepared, check
from jaxscale.step.step import batch_shardings
from jaxscale.step.texts import text_ids
from jaxscale.train.run import RunFolder
from jaxscale.train.signals import stop_signals
from jaxscale.train.start import FromRun
from jaxscale.training_session import TrainingSession, session


def grpo(
    run: RunFolder | TrainConfig | str | Path,
    *,
    prompts: Prompts | Sequence[str],
    reward: Callable[..., Any] | None = None,
    answers: Sequence[Any] = (),
    layout: Layout | None = None,
    folder: str | Path | None = None,
    resume: bool | str = False,
    quiet: bool = False,
    stop: Callable[[], bool] | None = None,
    **settings: Any,
) -> Run:
    """Train a run's model by rewards, with GRPO or another objective of reinforcement learning; leaves a run folder.

    Args:
      run: the run whose parameters to start from, or its folder; or settings of `train`.
      prompts: texts, or a corpus of prompts such as `js.data.arithmetic()`.
      reward: a function of a `Sample` that returns a number (see `RLConfig`); objectives with a teacher need none.
      answers: for texts: what the reward compares with, one for each.
      layout: mesh and rules, of training and, without `sampling_layout`, of sampling; `None` is one device for a run,
        or that of the settings.
      folder: the new run's folder, by default `runs/grpo-<n>`, with a teacher `runs/distill-<n>`.
      resume: as in `fit`: "newest" continues from the newest checkpoint if there is one.
      quiet: print nothing but warnings.
      stop: called after every step; returning `True` stops the run with a checkpoint.
      **settings: fields of `RLConfig`, and of `TrainConfig`, such as `steps`, `lr`, `batch_size` and `seq_len`.

    Returns:
      the new run, with its last state in memory.

    Raises:
      ConfigError: settings do not fit together.
      RunError: rewards failed too often in a row, or sampler and trainer disagree.
    """
    names = {f.name for f in dataclasses.fields(RLConfig)}
    own = RLConfig(reward=reward, **{k: settings.pop(k) for k in list(settings) if k in names})
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    if unknown := [k for k in settings if k not in known]:
        raise ConfigError(f"grpo has no setting '{unknown[0]}'; it has those of RLConfig and TrainConfig")
    if isinstance(prompts, str):
        raise ConfigError(f"prompts = {prompts!r}: must be a list of texts; write [{prompts!r}]")
    corpus = prompts if isinstance(prompts, Prompts) else PromptList(tuple(prompts), tuple(answers))
    changes: dict[str, Any] = {"data": corpus, **settings}
    if isinstance(run, TrainConfig):
        changes |= {} if layout is None else {"layout": layout}
        config = dataclasses.replace(run, **changes)
    else:
        path = run.path if isinstance(run, RunFolder) else Path(run)
        config = TrainConfig(**{"start": FromRun(str(path)), "layout": layout, **changes})
    name = "grpo" if config.objective.teacher is None else "distill"
    return reinforce(config, own, folder=folder, resume=resume, name=name, quiet=quiet, stop=stop)


def reinforce(
    config: TrainConfig,
    settings: RLConfig,
    *,
    folder: str | Path | None = None,
    resume: bool | str = False,
    name: str = "rl",
    quiet: bool = False,
    stop: Callable[[], bool] | None = None,
) -> Run:
    """Train by rewards; `grpo` and `jaxscale rl` call it.

    Args:
      config: settings of `train`; `train.data` are the prompts.
      settings: settings of `rl`.
      folder: as in `grpo`.
      resume: as in `grpo`.
      name: prefix of new run folders.
      quiet: as in `grpo`.
      stop: as in `grpo`.

    Raises:
      ConfigError: settings do not fit together.
      RunError: rewards failed too often in a row, or sampler and trainer disagree.
    """
    config = config_of(config)
    settings.check(config)
    prepare = functools.partial(_prepare, settings=settings)
    opened = session(config, folder=folder, resume=resume, name=name, prepare=prepare, quiet=quiet)
    with stop_signals() as signals, opened as s:
        loop = _Loop(s, settings)
        if s.step >= config.steps:
            raise RunError(
                f"{s.run.place} has already taken {s.step} of {config.steps} steps; raise train.steps to go on"
            )
        try:
            while s.step < config.steps:
                loop.steps()
                stopping = on_first(lambda: bool(signals) or (stop is not None and stop()))
                if stopping or s.step == config.steps or loop.saves(s.step):
                    s.save()
                if stopping:
                    break
        except (RewardError, GapError):
            s.save()
            raise
        s.run.stopped_by = signals.get("signal")
    return s.run


class GapError(RunError):
    """The log-probabilities of sampler and trainer are too far apart."""


class _Loop:
    """The steps of one run."""

    def __init__(self, s: TrainingSession, settings: RLConfig):
        self.s, self.settings, self.objective = s, settings, cast(Sampled, s.config.objective)
        self.sampler = Sampler(s, settings)
        self.prompts = cast(Prompts, s.config.data).prompts()
        self.order = Shuffle(len(self.prompts))
        self.count = s.config.batch_size // settings.completions
        self.gap, self.failures = settings.gap(s.config), 0
        if s.run.imported is not None:  # whose tokenizer may open a prompt otherwise than `_prepare` assumes
            for prompt in self.prompts:
                self.sampler.ids(prompt)  # raises now, and not after hours
        self.s.reporter.say(
            f"{len(self.prompts):,} prompts · {self.count} prompts x {settings.completions} completions a step · "
            f"{s.config.objective.describe(s.config)} · {s.config.steps} steps · run folder {s.run.place}"
        )

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due, at a step after which new samples are drawn."""
        every, updates = self.s.config.checkpoint_every, self.settings.updates
        return bool(every) and step % updates == 0 and step // every > (step - updates) // every

    def steps(self) -> None:
        """Sample, reward, and take `updates` optimizer steps."""
        s, began = self.s, time.perf_counter()
        try:
            samples, rewards, advantages, seconds = self._samples(s.step)
        except RewardError as e:
            for _ in range(self.settings.updates):
                s.skip_step(str(e))
            self.failures += 1
            if self.failures >= self.settings.patience:
                message = f"{e}; so it was in {self.failures} steps in a row (rl.patience)"
                raise RewardError(f"{message}, and {s.run.place} is saved at step {s.step}") from e
            return
        self.failures = 0
        live = [bool(np.any(row)) or not hasattr(self.objective, "resample") for row in advantages]
        batch = batch_of(samples, advantages.reshape(-1).tolist(), s.config.seq_len)
        batch["weights"] *= np.repeat(np.asarray(live, np.float32), self.settings.completions)[:, None]
        tokens = sum(x.tokens for x in samples)
        numbers: dict[str, Any] = {
            "completion_tokens": tokens / len(samples),
            "finished": float(np.mean([x.finished == "stop" for x in samples])),
            **seconds,
        }
        if self.settings.reward is not None:
            numbers |= {"reward": float(rewards.mean()), "reward_deviation": float(rewards.std())}
        if not any(live):
            for _ in range(self.settings.updates):
                s.skip_step("all completions of each prompt have one reward", numbers)
            return
        for update in range(self.settings.updates):
            updating = time.perf_counter()
            metrics = s.forward_backward(batch)
            if update == 0 and not metrics["logprob_gap_max"] <= self.gap:
                raise GapError(
                    f"step {s.step + 1}: sampler and trainer give a token log-probabilities up to "
                    f"{metrics['logprob_gap_max']:.3g} apart, more than rl.largest_gap = {self.gap:g}; raise it if the "
                    "model's dtype explains that, else the engine computes another model than the step"
                )
            reported = {k: v for k, v in metrics.items() if k != "loss"}
            now = time.perf_counter()
            row = {**reported, **numbers, "update_seconds": now - updating, "tokens_per_second": tokens / (now - began)}
            s.optim_step(row)
            self._show(row)

    def _show(self, row: dict[str, Any]) -> None:
        learned = "divergence" if "divergence" in row else "reward"
        self.s.reporter.say(
            f"step {self.s.step}/{self.s.config.steps}  {learned} {row[learned]:.3f}  "
            f"{row['completion_tokens']:.1f} tokens  gap {row['logprob_gap_max']:.1e}  "
            f"{row['tokens_per_second']:.0f} tokens/s"
        )

    def _samples(self, step: int) -> tuple[list[Sample], np.ndarray, np.ndarray, dict[str, float]]:
        """Return samples, rewards (P, G), advantages (P, G) and seconds; groups without advantages are drawn anew."""
        rounds = 1 + getattr(self.objective, "resample", 0)
        best: list[tuple[list[Sample], np.ndarray, np.ndarray]] = []
        flat: list[tuple[list[Sample], np.ndarray, np.ndarray]] = []
        seconds = {"sampling_seconds": 0.0, "reward_seconds": 0.0}
        for attempt in range(rounds):
            groups = self._round(step // self.settings.updates, attempt, rounds, seconds)
            best += [g for g in groups if rounds == 1 or np.any(g[2])]
            flat += [g for g in groups if rounds > 1 and not np.any(g[2])]
            if len(best) >= self.count:
                break
        chosen = (best + flat)[: self.count]
        samples = [x for group, _, _ in chosen for x in group]
        return samples, np.stack([r for _, r, _ in chosen]), np.stack([a for _, _, a in chosen]), seconds

    def _round(
        self, number: int, attempt: int, rounds: int, seconds: dict[str, float]
    ) -> list[tuple[list[Sample], np.ndarray, np.ndarray]]:
        s, each, began = self.s, self.settings.completions, time.perf_counter()
        first = (number * rounds + attempt) * self.count
        at = self.order(np.arange(first, first + self.count, dtype=np.int64), derive(s.config.seed, 7))
        prompts: list[Prompt] = [self.prompts[i] for i in at]
        repeated = [p for p in prompts for _ in range(each)]
        samples = self.sampler.sample(repeated, seeds(s.config.seed, number, attempt, len(repeated)))
        greedy = []
        if self.objective.greedy_baseline:
            greedy = self.sampler.sample(prompts, [0] * len(prompts), greedy=True)
        sampled = time.perf_counter()
        every = np.zeros(len(samples) + len(greedy))
        reward = self.settings.reward
        if reward is not None:
            rewarded, limit = [*samples, *greedy], self.settings.reward_seconds
            every = np.asarray(on_first(lambda: rewards_of(reward, rewarded, limit).tolist()))
        seconds["sampling_seconds"] += sampled - began
        seconds["reward_seconds"] += time.perf_counter() - sampled
        rewards = every[: len(samples)].reshape(self.count, each)
        lengths = np.asarray([x.tokens for x in samples]).reshape(self.count, each)
        shaped = self.objective.shaped(rewards, lengths, self.settings.max_tokens)
        advantages = self.objective.advantages(shaped, every[len(samples) :] if greedy else None)
        groups = [samples[i * each : (i + 1) * each] for i in range(self.count)]
        return list(zip(groups, rewards, advantages, strict=True))


@dataclasses.dataclass(frozen=True)
class _Source:
    """Stands for the rows of a corpus where batches are sampled."""

    name: str
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class _Samples:
    """Stands for the loader of a run's batches."""

    source: _Source


def _prepare(config: TrainConfig, *, settings: RLConfig) -> Prepared:
    """Check the run, and digest what its batches depend on, so that a resumed run has the same."""
    if config.layout is not None:
        _ = config.layout.device_mesh
    blueprint, schedule = check(config)
    settings.sampler_layout(config)
    prompts = cast(Prompts, config.data)
    for prompt in prompts.prompts():
        settings.check_length(prompt.text, len(text_ids(config, prompt.text)), config)
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    fixed = {k: values[k] for k in ("completions", "max_tokens", "updates", "turns", "stop")}
    text = f"{prompts.fingerprint()} {config.batch_size} {config.seed} {sorted(fixed.items())}"
    source: Any = _Source(prompts.name, hashlib.sha256(text.encode()).hexdigest())
    shardings = batch_shardings(config.layout, config.objective.inputs(config), config.batch_size)
    return Prepared(blueprint, schedule, cast(Any, _Samples(source)), {}, shardings)
