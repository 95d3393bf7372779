"""Caches of keys and values that lie in a tree beside the parameters: they follow their heads.

Flax keeps them in a collection of their own (Linen) or in the attention module (NNX), and people
in dicts. Every device holds the keys of the heads that it computes; the tensor axis takes no other
dim of a cache.
"""

from collections.abc import Iterator, Mapping

from jaxtp.rules.model_tree import Leaf, ModelTree
from jaxtp.rules.roles import Placement, Role, Source, Vote
from jaxtp.rules.words import FUSED_QKV, Word

_WRITERS = FUSED_QKV | {Word.K, Word.V, Word.KV}
"""What writes a cache of keys and values."""


def votes(tree: ModelTree, found: Mapping[str, Vote]) -> Iterator[Vote]:
    """Votes for caches beside projections that the other sources have decided.

    Args:
        tree: The tree's names and shapes.
        found: Votes by path, projections included.
    """
    caches = [leaf for leaf in tree.leaves.values() if leaf.name.word is Word.CACHE]
    writers = [
        leaf
        for leaf in (tree.leaves.values() if caches else ())
        if leaf.name.word in _WRITERS and not leaf.name.bias and _placed(found.get(leaf.param.path))
    ]
    for cache in caches if writers else ():
        near = max(writers, key=lambda writer: _shared(cache, writer))
        vote = found[near.param.path]
        placement = next(filter(None, (_placement(cache, p) for p in vote.placements)), None)
        if placement is not None:
            heads = f"the {placement.units[0]} heads of {near.name.stem}"
            reason = f"cache, dim {placement.dim} holds {heads}"
            yield Vote(cache.param.path, Source.NAMES, Role.CACHE, reason, (placement,), vote.group)


def _placed(vote: Vote | None) -> bool:
    return vote is not None and bool(vote.placements)


def _shared(cache: Leaf, writer: Leaf) -> int:
    """How many modules two paths have in common, whatever collections they are in."""
    return len({*cache.param.path.split("/")[:-1]} & {*writer.param.path.split("/")[:-1]})


def _placement(cache: Leaf, choice: Placement | None) -> Placement | None:
    """The dim of the heads: the last that counts them, before the width of a head."""
    if choice is None or len(cache.sizes) < 3:
        return None
    count = choice.units[0]
    fits = [d for d in cache.core[:-1] if cache.param.shape[d] == count]
    return Placement(fits[-1], (count,)) if fits else None
