"""Planning: what a run will do and cost, before it runs."""

from jaxscale.plan.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
