"""The model read from its own program: `analyse` turns a function into findings.

One file a step: `walk` reads the jaxpr with the table in `primitives` (`shapes`, `contractions`,
`control`, `reentry`) and collects `records` about `classes` of dims; `evidence` judges each class;
`regions` chooses what is split; `report` words it; `analysis` is the whole story. The section "One
example, from jaxpr to spec" of `docs/design.md` follows two kernels through all of it.
"""

from jaxtp.rules.jaxpr.analysis import Analysis, ClassInfo, DimClass, analyse, analyse_jaxpr
from jaxtp.rules.jaxpr.records import Finding, Opaque, Option

__all__ = [
    "Analysis",
    "ClassInfo",
    "DimClass",
    "Finding",
    "Opaque",
    "Option",
    "analyse",
    "analyse_jaxpr",
]
