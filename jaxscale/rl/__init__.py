"""Reinforcement learning on one mesh: the engine samples, Python functions give rewards, the step learns.

run = js.rl.grpo("runs/base", prompts=["1+1=", "2+3="], answers=[2, 5], reward=js.rl.ArithmeticReward(), steps=100)
"""

from jaxscale.data.prompts import Prompt, Prompts
from jaxscale.rl.bleu import BleuReward, sentence_bleu
from jaxscale.rl.code import CodeReward, run_code
from jaxscale.rl.config import RLConfig
from jaxscale.rl.distill import distill
from jaxscale.rl.loop import grpo, reinforce
from jaxscale.rl.rewards import ArithmeticReward, Sample

__all__ = [
    "ArithmeticReward",
    "BleuReward",
    "CodeReward",
    "Prompt",
    "Prompts",
    "RLConfig",
    "Sample",
    "distill",
    "grpo",
    "reinforce",
    "run_code",
    "sentence_bleu",
]
