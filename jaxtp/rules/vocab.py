"""Token tables, output heads and their biases: who carries the vocabulary."""

from collections.abc import Iterator

from jaxtp.rules.model_tree import Leaf, ModelTree
from jaxtp.rules.roles import Placement, Role, Source, Vote
from jaxtp.rules.words import ATTENTION, Word

NEVER_HEAD = ATTENTION | {
    Word.NORM,
    Word.TOKENS,
    Word.POSITION,
    Word.CONV,
    Word.ROUTER,
    Word.FOLLOWER,
    Word.CACHE,
    Word.MODULATION,
}

FEWEST_TOKENS = 1024
"""An output at least this wide is a vocabulary where only its size tells."""


def votes(tree: ModelTree) -> Iterator[Vote]:
    """Votes for token tables, heads, and biases as long as the vocabulary."""
    vocabs = {tree.dims.vocab_size} - {0}
    for leaf in tree.leaves.values():
        if _is_table(leaf):
            dim = _vocab_dim(tree, leaf, vocabs)
            size = leaf.param.shape[dim]
            vocabs.add(size)
            yield _vote(leaf, dim, f"table of {size} tokens")
    known = tree.streams | tree.widths
    for leaf in tree.leaves.values():
        if leaf.name.word not in NEVER_HEAD:
            yield from _head_votes(leaf, vocabs, known)


def _is_table(leaf: Leaf) -> bool:
    """Two dims or more with more rows than a class token or a mask token has.

    Without a name, rows that are looked up are tokens if there are many.
    """
    if len(leaf.sizes) < 2 or min(leaf.sizes) < 2 or leaf.name.bias:
        return False
    many = leaf.sizes[0] >= max(FEWEST_TOKENS, leaf.sizes[-1] + 1)
    unnamed = leaf.looked_up and leaf.name.word is Word.NONE and many
    return leaf.name.word is Word.TOKENS or unnamed


def _vocab_dim(tree: ModelTree, leaf: Leaf, vocabs: set[int]) -> int:
    """Rows, unless they are as many as the model is wide and the columns are not."""
    known = next((d for d in leaf.core if leaf.param.shape[d] in vocabs), None)
    if known is not None:
        return known
    first, second = leaf.core[:2]
    hidden = tree.dims.hidden_size
    turned = leaf.param.shape[first] == hidden != leaf.param.shape[second]
    return second if turned else first


def _head_votes(leaf: Leaf, vocabs: set[int], streams: frozenset[int]) -> Iterator[Vote]:
    """A head puts out as many numbers as a token table has rows, or more than there are classes.

    Only the size needs to tell where a matrix leads from the residual stream to many tokens.
    """
    shape, named = leaf.param.shape, leaf.name.word is Word.HEAD
    dim = next((d for d in reversed(leaf.core) if shape[d] in vocabs), None)
    if dim is None and named:
        dim = next((d for d in reversed(leaf.core) if shape[d] not in streams), None)
    if dim is None:
        return
    others = {shape[d] for d in leaf.core if d != dim} - {1}
    large = shape[dim] >= FEWEST_TOKENS and shape[dim] > max(others, default=0)
    if shape[dim] in vocabs and (named or leaf.name.bias or (large and others & streams)):
        yield _vote(leaf, dim, f"puts out the {shape[dim]} tokens of the table")
    elif named and large:
        yield _vote(leaf, dim, f"output head of {shape[dim]} tokens")


def _vote(leaf: Leaf, dim: int, reason: str) -> Vote:
    placement = Placement(dim, (leaf.param.shape[dim],))
    return Vote(
        leaf.param.path,
        Source.NAMES,
        Role.VOCAB,
        reason,
        (placement,),
        f"vocab:{placement.units[0]}",
    )
