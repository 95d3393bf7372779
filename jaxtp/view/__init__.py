"""Plans and compiled steps as pages that people can look at."""

from jaxtp.view.page import Node, Section, page, to_html
from jaxtp.view.plan import draw, plan_sections, see_tp_plan
from jaxtp.view.report import report_sections

__all__ = [
    "Node",
    "Section",
    "draw",
    "page",
    "plan_sections",
    "report_sections",
    "see_tp_plan",
    "to_html",
]
