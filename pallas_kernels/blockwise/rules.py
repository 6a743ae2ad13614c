"""Update rules as values: elementwise float32 arithmetic, which one fused kernel runs for any rule.

A rule receives the elements of a parameter, their gradients and their dequantised states, and returns the update to add
to the parameter and the new states. To add a rule, add a function here; the kernels do not change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Scalars = Mapping[str, jax.Array]
Step = Callable[[jax.Array, jax.Array, tuple[jax.Array, ...], Scalars], tuple[jax.Array, tuple[jax.Array, ...]]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """An elementwise update.

    Args:
      name: for messages and records.
      states: for each state, whether it may be negative.
      scalars: names of the float32 numbers that the rule needs at each step.
      derive: maps those numbers to the ones that `step` reads, computed once per step instead of once per element.
      step: `(p, g, states, derived) -> (update, new_states)`, elementwise in float32.
    """

    name: str
    states: tuple[bool, ...]
    scalars: tuple[str, ...]
    derive: Callable[[Scalars], dict[str, jax.Array]]
    step: Step


def adamw() -> Rule:
    """Return the rule of Adam with decoupled weight decay (Loshchilov & Hutter 2019). States: m, v. `ADAMW` holds it.

    m' = b1 m + (1 - b1) g;  v' = b2 v + (1 - b2) g^2;
    update = -lr ((m' / fix1) / (sqrt(v' / fix2) + eps) + weight_decay p), with fix1 = 1 - b1^t and fix2 = 1 - b2^t.
    """

    def derive(s: Scalars) -> dict[str, jax.Array]:
        root = jnp.sqrt(s["fix2"])
        rate = -s["lr"]
        return _moments(s) | {
            "eps": s["eps"] * root,
            "rate": rate * root / s["fix1"],
            "shrink": rate * s["weight_decay"],
        }

    def step(p: Any, g: Any, states: Any, s: Any) -> Any:
        m, v = _new_moments(g, states, s)
        return m * s["rate"] / (jnp.sqrt(v) + s["eps"]) + p * s["shrink"], (m, v)

    scalars = ("lr", "b1", "b2", "eps", "weight_decay", "fix1", "fix2")
    return Rule("adamw", (True, False), scalars, derive, step)


def adam_direction() -> Rule:
    """Return the rule of Adam's direction without a learning rate, for LAMB (You et al. 2020). States: m, v.

    LAMB's trust ratio is applied outside. m' and v' as in `adamw`; update = (m' / fix1) / (sqrt(v' / fix2) + eps) +
    weight_decay p, with a plus sign.
    """

    def derive(s: Scalars) -> dict[str, jax.Array]:
        root = jnp.sqrt(s["fix2"])
        return _moments(s) | {"eps": s["eps"] * root, "rate": root / s["fix1"], "weight_decay": s["weight_decay"]}

    def step(p: Any, g: Any, states: Any, s: Any) -> Any:
        m, v = _new_moments(g, states, s)
        return m * s["rate"] / (jnp.sqrt(v) + s["eps"]) + p * s["weight_decay"], (m, v)

    scalars = ("b1", "b2", "eps", "weight_decay", "fix1", "fix2")
    return Rule("adam_direction", (True, False), scalars, derive, step)


def lion() -> Rule:
    """Return the rule of Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"). State: m.

    update = -lr (sign(b1 m + (1 - b1) g) + weight_decay p);  m' = b2 m + (1 - b2) g.
    """

    def derive(s: Scalars) -> dict[str, jax.Array]:
        return _moments(s) | {"rate": -s["lr"], "shrink": -s["lr"] * s["weight_decay"]}

    def step(p: Any, g: Any, states: Any, s: Any) -> Any:
        (m,) = states
        c = m * s["b1"] + g * s["c1"]
        # sign(c), which not every kernel language has; 0 stays 0, and NaN stays NaN.
        sign = jnp.where(c > 0, 1.0, jnp.where(c < 0, -1.0, c))
        return sign * s["rate"] + p * s["shrink"], (m * s["b2"] + g * s["c2"],)

    return Rule("lion", (True,), ("lr", "b1", "b2", "weight_decay"), derive, step)


def momentum(nesterov: bool = False) -> Rule:
    """Return the rule of gradient descent with momentum (Sutskever et al. 2013; as `optax.sgd`). State: m.

    m' = momentum m + g + weight_decay p;  update = -lr m', or -lr (g + weight_decay p + momentum m') with Nesterov.

    Args:
      nesterov: use Nesterov's form.
    """
    return _momentum(bool(nesterov))


@functools.cache
def _momentum(nesterov: bool) -> Rule:
    def derive(s: Scalars) -> dict[str, jax.Array]:
        return {"momentum": s["momentum"], "rate": -s["lr"], "weight_decay": s["weight_decay"]}

    def step(p: Any, g: Any, states: Any, s: Any) -> Any:
        g = g + p * s["weight_decay"]
        m = states[0] * s["momentum"] + g
        return (g + m * s["momentum"] if nesterov else m) * s["rate"], (m,)

    name = "nesterov" if nesterov else "momentum"
    return Rule(name, (True,), ("lr", "momentum", "weight_decay"), derive, step)


def adagrad() -> Rule:
    """Return the rule of Adagrad (Duchi, Hazan & Singer 2011). State: the sum s of squared gradients.

    s' = s + g^2;  update = -lr (g / (sqrt(s') + eps) + weight_decay p).
    """

    def derive(s: Scalars) -> dict[str, jax.Array]:
        return {"rate": -s["lr"], "eps": s["eps"], "shrink": -s["lr"] * s["weight_decay"]}

    def step(p: Any, g: Any, states: Any, s: Any) -> Any:
        total = states[0] + g * g
        return g * s["rate"] / (jnp.sqrt(total) + s["eps"]) + p * s["shrink"], (total,)

    return Rule("adagrad", (False,), ("lr", "eps", "weight_decay"), derive, step)


def _moments(s: Scalars) -> dict[str, jax.Array]:
    return {"b1": s["b1"], "b2": s["b2"], "c1": 1 - s["b1"], "c2": 1 - s["b2"]}


def _new_moments(g: jax.Array, states: tuple[jax.Array, ...], s: Scalars) -> tuple[jax.Array, jax.Array]:
    m, v = states
    return m * s["b1"] + g * s["c1"], v * s["b2"] + g * g * s["c2"]


ADAMW, ADAM_DIRECTION, LION, ADAGRAD = adamw(), adam_direction(), lion(), adagrad()
MOMENTUM, NESTEROV = momentum(), momentum(nesterov=True)
RULES: Mapping[str, Rule] = {r.name: r for r in (ADAMW, ADAM_DIRECTION, LION, MOMENTUM, NESTEROV, ADAGRAD)}
"""Every rule by name. Each is one object, so that JAX reuses what it compiled for the rule."""
