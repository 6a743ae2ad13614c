"""Checks for your own parts: the ones that jaxscale's tests apply to its layers, rules, optimizers and kernels.

    js.testing.compare_layouts(js.models.TransformerConfig(mlp=MyMLP), [js.Layout("data=2,tensor=4")])
    js.testing.compare_optimizer(MyOptimizer(), [js.Layout("fsdp=8")])
    js.testing.compare_op(my_kernel, plain, x, w)

    js.testing.check_objective(config, batch)
    js.testing.check_model(my_config)
    js.testing.check_mixer(MyRecurrence())

The first three return an `Agreement`, which prints a table of errors as shares of what is allowed; its `check()` raises
if any is exceeded. The others raise by themselves.
"""

from jaxscale.testing.compare import Agreement, Difference, assert_leaves_agree, differences
from jaxscale.testing.layouts import assert_layouts_agree, compare_layouts, random_batch
from jaxscale.testing.models import check_mixer, check_model
from jaxscale.testing.objectives import check_objective
from jaxscale.testing.ops import compare_op
from jaxscale.testing.optimizers import compare_optimizer
from jaxscale.testing.params import random_params

__all__ = [
    "Agreement",
    "Difference",
    "assert_layouts_agree",
    "assert_leaves_agree",
    "check_mixer",
    "check_model",
    "check_objective",
    "compare_layouts",
    "compare_op",
    "compare_optimizer",
    "differences",
    "random_batch",
    "random_params",
]
