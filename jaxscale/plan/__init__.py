"""Planning: what a run will do and cost, before it runs."""

from jaxscale.plan.compile import compile_for, compile_step, topology_devices
from jaxscale.plan.explain import Explanation, explain
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.planner import Plan, plan_for
from jaxscale.plan.policies import Choice, choose, compiled_bytes

__all__ = [
    "Choice",
    "Estimate",
    "Explanation",
    "Plan",
    "choose",
    "compile_for",
    "compile_step",
    "compiled_bytes",
    "estimate",
    "explain",
    "plan_for",
    "topology_devices",
]
