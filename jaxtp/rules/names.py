"""Evidence from names and shapes: one vote for every leaf of a tree.

This source always has an opinion, if only "no evidence: replicated".
"""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxtp.plan.trees import Param
from jaxtp.rules import adapters, attention, caches, mlp, model_tree, vocab
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.model_tree import Leaf, ModelTree
from jaxtp.rules.path_words import spaced
from jaxtp.rules.roles import Role, Source, Vote
from jaxtp.rules.words import RECURRENT, Word

REPLICATED: dict[Word, tuple[Role, str]] = {
    Word.NORM: (Role.NORM, "scale or statistic of a norm"),
    Word.MODULATION: (
        Role.UNKNOWN,
        "makes scales and offsets of norms, and names do not tell which of those are sharded",
    ),
    Word.POSITION: (Role.POSITION, "positions or types are looked up by every device"),
    Word.CONV: (Role.CONV, "convolution: its channels are not a tensor-parallel dim"),
    Word.ROUTER: (Role.ROUTER, "every device needs all scores of the router"),
    Word.FOLLOWER: (Role.ADAPTER, "adapter or scale, and no weight beside it fits its shape"),
    Word.CACHE: (Role.CACHE, "cache: none of its dims counts the heads of keys beside it"),
    Word.LOW_RANK: (Role.LOW_RANK, "low-rank factor: small, and its rank stays together"),
}


def votes(params: Mapping[str, Param], dims: ModelDims) -> list[Vote]:
    """One vote per leaf, in the tree's order.

    Raises:
        SizeMismatch: TP003, if given head counts fit no attention block.
    """
    tree = model_tree.read(params, dims)
    found: dict[str, Vote] = {}
    for source in (_recurrent, attention.votes, mlp.votes, vocab.votes):
        for vote in source(tree):
            found.setdefault(vote.path, vote)
    found.update((vote.path, vote) for vote in adapters.votes(tree, found))
    found.update((vote.path, vote) for vote in caches.votes(tree, found))
    routed = {n for leaf in tree.leaves.values() if leaf.name.experts for n in leaf.nodes}
    return [
        dataclasses.replace(
            found.get(path) or _replicated(leaf, routed),
            stacked_dims=() if leaf.layer is None else (leaf.layer,),
        )
        for path, leaf in tree.leaves.items()
    ]


def _recurrent(tree: ModelTree) -> Iterator[Vote]:
    """Everything inside a recurrent mixer: names do not tell which of its widths stay apart."""
    mixers = {
        leaf.nodes[0]
        for leaf in tree.leaves.values()
        if RECURRENT.search(spaced(leaf.param.path.rpartition("/")[2]))
    }
    reason = "inside a recurrent mixer (state space, linear attention): replicated"
    for leaf in tree.leaves.values() if mixers else ():
        if not mixers.isdisjoint(leaf.nodes):
            yield Vote(leaf.param.path, Source.NAMES, Role.UNKNOWN, reason)


def _replicated(leaf: Leaf, routed: set[str]) -> Vote:
    """What is replicated for a reason, or for want of one."""
    word, rank = leaf.name.word, sum(n > 1 for n in leaf.sizes)
    if word is Word.IN and rank == 2 and routed & set(leaf.nodes[1:2]):
        word = Word.ROUTER  # a "gate" beside experts, without a partner of its own
    if word in REPLICATED:
        role, reason = REPLICATED[word]
    elif rank < 2:
        role, reason = Role.NORM, "a vector or scalar that nothing ties to a sharded dim"
    elif rank > 3:
        role, reason = REPLICATED[Word.CONV]
    else:
        role, reason = Role.UNKNOWN, "no evidence: no partner by shape, and the name says nothing"
        if word is not Word.NONE:
            reason = f"no evidence: named like {word}, but its shape has no partner"
    return Vote(leaf.param.path, Source.NAMES, role, reason)
