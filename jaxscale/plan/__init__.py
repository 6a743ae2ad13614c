"""Planning: what a run will do and cost, before it runs."""

from jaxscale.plan.compile import compile_for, compile_step, topology_devices
from jaxscale.plan.explain import Explanation, explain

__all__ = ["Explanation", "compile_for", "compile_step", "explain", "topology_devices"]
