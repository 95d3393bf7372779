"""`jaxtp view`: a plan as a page."""

from typing import Annotated

import tyro

from jaxtp.cli.plan_commands import DEFAULTS, Options, Tree, plan_of
from jaxtp.inspect.pages import see_tp_plan


def view(
    tree: Tree,
    html: Annotated[str, tyro.conf.arg(aliases=("--page",))] = "tp_plan.html",
    options: Options = DEFAULTS,
) -> None:
    """Write the plan of a model as an HTML page.

    Args:
        tree: File written by jaxtp.dump_tree, a preset, or package.module:function, which returns
            (fn, params, inputs).
        html: The page to write.
        options: How to plan.
    """
    print(see_tp_plan(plan_of(tree, options), html))
