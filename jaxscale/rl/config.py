"""Settings of reinforcement learning beside those of `train`: `rl` in gin."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.config import register
from jaxscale.data.prompts import Prompts
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, shardings_of
from jaxscale.layout.mesh import parse_mesh
from jaxscale.step import GRPO, TrainConfig, settled
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.objectives.sampled import Sampled

Tool = Callable[[Any], str | None]
"""`tool(sample) -> the text that follows, or None to end`: called after each turn of a sequence."""


@register(name="rl")
@dataclasses.dataclass(frozen=True)
class RLConfig:
    """Settings of reinforcement learning; prompts are `train.data`, the method is `train.objective`.

    Args:
      reward: a function of a `Sample`, such as `ArithmeticReward()`; with an attribute `batched = True` of a list of
        them. `None` is for objectives that learn from a teacher alone.
      completions: samples of each prompt; `train.batch_size` is a multiple of it.
      max_tokens: the most new tokens of a turn.
      updates: optimizer steps on the same samples; the ratio of the objective corrects for the changed parameters.
      turns: the most turns of a sequence.
      tool: called after each turn but the last: returns the text that follows, which is not learned, or `None`.
      stop: texts that end a turn.
      rows: sequences that the engine generates at once, on each of the devices that shard the batch.
      reward_seconds: time limit of the rewards of a step.
      patience: steps in a row without usable rewards after which the run stops.
      sampling_layout: mesh and rules of sampling; `None` is those of training. Parameters are moved between devices in
        each step, not through a disk, and are in memory twice while samples are drawn.
      sampling_apart: place `sampling_layout` on devices that training does not use; else it begins at the first one.
      largest_gap: the run stops if sampler and trainer give a generated token log-probabilities further apart; `None`
        is 1e-3 for models in float32 and 0.5 for others.

    Raises:
      ConfigError: a setting is out of its range.
    """

    reward: Callable[..., Any] | None = None
    completions: int = 8
    max_tokens: int = 64
    updates: int = 1
    turns: int = 1
    tool: Tool | None = None
    stop: tuple[str, ...] = ()
    rows: int = 32
    reward_seconds: float = 60.0
    patience: int = 3
    sampling_layout: Layout | None = None
    sampling_apart: bool = False
    largest_gap: float | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and (isinstance(self.reward, type) or not callable(self.reward)):
            raise ConfigError(
                f"rl.reward must be a function of a sample, such as ArithmeticReward(), not {self.reward!r}"
            )
        for name in ("completions", "max_tokens", "updates", "turns", "rows", "patience"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"rl.{name} = {value!r}: must be a whole number of at least 1")
        for name in ("reward_seconds", "largest_gap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"rl.{name} = {value}: must be above 0 and finite")
        if (self.tool is None) != (self.turns == 1):
            raise ConfigError("rl.turns above 1 needs rl.tool, which answers between turns, and rl.tool needs rl.turns")
        if self.sampling_layout is not None and not isinstance(self.sampling_layout, Layout):
            raise ConfigError(f"rl.sampling_layout = {self.sampling_layout!r}: must be a Layout, such as @Layout()")
        if self.sampling_apart and self.sampling_layout is None:
            raise ConfigError("rl.sampling_apart needs rl.sampling_layout, the mesh on the other devices")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))

    def gap(self, config: TrainConfig) -> float:
        """Return `largest_gap`, or its default for the model's dtype.

        Args:
          config: the run's settings.
        """
        if self.largest_gap is not None:
            return self.largest_gap
        return 1e-3 if getattr(config.model, "dtype", "float32") in (None, "float32") else 0.5

    def sampler_layout(self, config: TrainConfig) -> Layout | None:
        """Return the layout of sampling with its devices, or `None` for that of training.

        Args:
          config: the run's settings.

        Raises:
          LayoutError: there are too few devices, or the model does not fit the layout.
        """
        layout = self.sampling_layout
        if layout is None:
            return None
        if self.sampling_apart:
            used = 1 if config.layout is None else config.layout.devices
            rest = jax.devices()[used:]
            needed = math.prod(parse_mesh(layout.mesh).values())
            if not rest or needed > len(rest):
                raise LayoutError(
                    f"rl.sampling_layout '{layout.mesh}' needs {abs(needed)} devices beside the {used} of training, "
                    f"and there are {len(rest)}; set rl.sampling_apart = False or use smaller meshes"
                )
            layout = layout.on(rest)
        _ = layout.device_mesh  # raises if there are too few devices
        blueprint, _ = blueprint_of(dataclasses.replace(config, layout=layout))
        shardings_of(blueprint.of_model().infos, layout)
        return layout

    def check(self, config: TrainConfig) -> None:
        """Check the settings of a run.

        Args:
          config: the run's settings.

        Raises:
          ConfigError: they do not fit together.
        """
        objective = config.objective
        if not isinstance(objective, Sampled):
            raise ConfigError(
                "reinforcement learning needs train.objective = @GRPO(), @DAPO(), @GSPO(), @RLOO(), @ReMax() or "
                f"@OnPolicyDistill(), not {type(objective).__name__}"
            )
        if objective.learns_rewards and self.reward is None:
            raise ConfigError(
                f"{type(objective).__name__} learns from rewards; set rl.reward, such as @ArithmeticReward()"
            )
        if not isinstance(config.data, Prompts):
            raise ConfigError(
                "reinforcement learning needs prompts: train.data = @prompt_files(), @arithmetic() or another "
                f"jaxscale.data.Prompts, not {config.data!r}"
            )
        if config.batch_size % self.completions:
            below = max(config.batch_size // self.completions, 1) * self.completions
            raise ConfigError(
                f"rl.completions = {self.completions} does not divide train.batch_size = {config.batch_size}; the "
                f"nearest train.batch_size that works is {below}"
            )
        if self.completions < objective.least_group:
            raise ConfigError(
                f"{type(objective).__name__} compares the completions of a prompt; set rl.completions to "
                f"{objective.least_group} or more"
            )
        if config.steps % self.updates:
            raise ConfigError(f"rl.updates = {self.updates} does not divide train.steps = {config.steps}")
        if self.max_tokens >= config.seq_len:
            raise ConfigError(
                f"rl.max_tokens = {self.max_tokens} leaves no place for a prompt in train.seq_len = {config.seq_len}"
            )

    def check_length(self, text: str, tokens: int, config: TrainConfig) -> None:
        """Check that a row holds a prompt and what is generated after it.

        Args:
          text: the prompt.
          tokens: its number of tokens.
          config: the run's settings.

        Raises:
          ConfigError: it does not.
        """
        longest = tokens + self.max_tokens - 1
        if longest > config.seq_len:
            raise ConfigError(
                f"the prompt {text[:60]!r} has {tokens} tokens; with rl.max_tokens = {self.max_tokens} it needs "
                f"train.seq_len = {longest} or more"
            )


def config_of(config: TrainConfig) -> TrainConfig:
    """Return settings of `train` as reinforcement learning uses them: no evaluation, and GRPO by default.

    Args:
      config: the settings.
    """
    changes: dict[str, Any] = {"eval_batches": 0, "eval_every": 0, "evaluate_on": {}, "prompt": None}
    if config.objective == TrainConfig.__dataclass_fields__["objective"].default:
        changes["objective"] = GRPO()
    return settled(dataclasses.replace(config, **changes))
