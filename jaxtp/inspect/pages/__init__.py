"""Plans and compiled steps as pages that people can look at."""

from jaxtp.inspect.pages.html import Node, Section, page, to_html
from jaxtp.inspect.pages.plan_page import draw, plan_sections, see_tp_plan
from jaxtp.inspect.pages.report_page import report_sections

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
