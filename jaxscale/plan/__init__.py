"""Planning: what a run will do and cost, before it runs."""

from jaxscale.plan.as_gin import as_gin
from jaxscale.plan.compare import Comparison, compare
from jaxscale.plan.compile import compile_for, compile_step, lower_step, topology_devices
from jaxscale.plan.coordcheck import CoordCheck, coordcheck
from jaxscale.plan.dry_run import DryRun, dry_run
from jaxscale.plan.explain import Explanation, explain
from jaxscale.plan.fit_on import Limits, TopologyChoice, cheapest, fit_on
from jaxscale.plan.measured import Measured, measured
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.planner import Plan, plan_for
from jaxscale.plan.policies import Choice, choose, compiled_bytes
from jaxscale.plan.restarts import Restarts
from jaxscale.plan.search import Search, search
from jaxscale.plan.serving import Serving, serving
from jaxscale.plan.space import Space

__all__ = [
    "Choice",
    "Comparison",
    "CoordCheck",
    "DryRun",
    "Estimate",
    "Explanation",
    "Limits",
    "Measured",
    "Plan",
    "Restarts",
    "Search",
    "Serving",
    "Space",
    "TopologyChoice",
    "as_gin",
    "cheapest",
    "choose",
    "compare",
    "compile_for",
    "compile_step",
    "compiled_bytes",
    "coordcheck",
    "dry_run",
    "estimate",
    "explain",
    "fit_on",
    "lower_step",
    "measured",
    "plan_for",
    "search",
    "serving",
    "topology_devices",
]
