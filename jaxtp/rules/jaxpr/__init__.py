"""The model read from its own program: `analyse` turns a function into findings.

The stages are the files: `walk` reads the jaxpr with the table in `handlers` (`shapes`, `products`,
`control`) and collects `facts` about `classes` of dims; `evidence` judges each class; `regions`
chooses what is split; `report` words it; `analysis` is the whole story.
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
