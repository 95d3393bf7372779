"""Experts that work on tokens which did not choose them.

A loop over the MLPs of experts, or one product by all of them, runs every expert on every token;
what was not chosen is multiplied by zero. The numbers are right and the work is experts / chosen of
what is needed, which no partitioner can take back.
"""

from collections.abc import Sequence

from jaxtp.rules.jaxpr.classes import classes_in, dim_size
from jaxtp.rules.jaxpr.evidence import EXPERT, Evidence
from jaxtp.rules.jaxpr.records import Contraction, Fact, Whole

_CHOOSES = ("top_k", "approx_top_k", "argmax")

Share = tuple[int, int]
"""Experts that work on a token, and those of them that it chose."""


def unchosen_work(facts: Sequence[Fact], evidence: Evidence) -> dict[int, Share]:
    """Products in which every expert works on every token: id of the equation -> its share.

    Either a product has the experts among the output dims of its weight. Or as many MLPs as a
    router has scores take what the router takes, each with weights of the same sizes.

    Args:
        facts: What the walker saw.
        evidence: What is known about its classes.
    """
    chosen = {
        dim_size(fact.dim): fact.equation.params.get("k", 1)
        for fact in facts
        if isinstance(fact, Whole) and fact.why in _CHOOSES
    }
    products = [fact for fact in facts if isinstance(fact, Contraction)]
    found: dict[int, Share] = {}
    for fact in products:
        stacks = [atom for atom in classes_in(fact.free) if evidence.kind(atom) == EXPERT]
        experts = dim_size(tuple(stacks))
        if stacks and chosen.get(experts, experts) < experts and not evidence.routes(fact.path):
            found[id(fact.equation)] = experts, chosen[experts]
    for fact, experts in _alike(products, list(chosen)):
        if chosen[experts] < experts:
            found[id(fact.equation)] = experts, chosen[experts]
    for fact in products:  # in program order: what follows on what every expert made
        made = [one for atom in classes_in(fact.summed) for one in evidence.of(atom).produced]
        shares = [found.get(id(one.equation)) for one in made]
        if shares and shares[0] is not None and all(shares):
            found.setdefault(id(fact.equation), shares[0])
    return found


def _alike(
    products: Sequence[Contraction], numbers: Sequence[int]
) -> list[tuple[Contraction, int]]:
    """Products by the weights of experts that stand apart, and how many experts there are."""
    groups: dict[tuple[int, int, int], list[Contraction]] = {}
    routers: dict[int, set[int]] = {}
    for fact in products:
        free = dim_size(sum(fact.free, ()))
        routers.setdefault(fact.source, set()).add(free)
        groups.setdefault((fact.source, dim_size(sum(fact.summed, ())), free), []).append(fact)
    return [
        (fact, experts)
        for (source, *_), group in groups.items()
        for experts in numbers
        if experts in routers[source] and len(group) in (experts, 2 * experts)
        for fact in group
    ]
