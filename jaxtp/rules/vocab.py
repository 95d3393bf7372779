"""Token tables, output heads and their biases: who carries the vocabulary.

Stage in: a `Block`. Stage out: votes.
"""

from collections.abc import Iterator

from jaxtp.rules.blocks import Block, Leaf
from jaxtp.rules.roles import Placement, Role, Source, Vote
from jaxtp.rules.words import Word

FEWEST_TOKENS = 1024
"""An output at least this wide is a vocabulary where only its size tells (DATAFLOW 3.5)."""


def votes(block: Block) -> Iterator[Vote]:
    """Votes for token tables, heads, and biases as long as the vocabulary."""
    vocabs = {block.dims.vocab_size} - {0}
    for leaf in block.leaves.values():
        if leaf.name.word is Word.TOKENS and not leaf.name.bias and _is_table(leaf):
            dim = _vocab_dim(block, leaf, vocabs)
            size = leaf.param.shape[dim]
            vocabs.add(size)
            yield _vote(leaf, dim, f"table of {size} tokens")
    for leaf in block.leaves.values():
        if leaf.name.word is Word.HEAD or (leaf.name.bias and leaf.name.word is Word.NONE):
            yield from _head_votes(leaf, vocabs)


def _is_table(leaf: Leaf) -> bool:
    """Two dims or more with more rows than a class token or a mask token has."""
    return len(leaf.sizes) > 1 and min(leaf.sizes) > 1


def _vocab_dim(block: Block, leaf: Leaf, vocabs: set[int]) -> int:
    """Rows, unless they are as many as the model is wide and the columns are not."""
    known = next((d for d in leaf.core if leaf.param.shape[d] in vocabs), None)
    if known is not None:
        return known
    first, second = leaf.core[:2]
    hidden = block.dims.hidden_size
    turned = leaf.param.shape[first] == hidden != leaf.param.shape[second]
    return second if turned else first


def _head_votes(leaf: Leaf, vocabs: set[int]) -> Iterator[Vote]:
    """A head's output is as long as a token table, or longer than any set of classes would be."""
    shape = leaf.param.shape
    wide = max(leaf.core, key=lambda d: shape[d], default=None)
    if wide is None:
        return
    dim = next((d for d in reversed(leaf.core) if shape[d] in vocabs), wide)
    lone = max((shape[d] for d in leaf.core if d != dim), default=0)
    if shape[dim] in vocabs:
        yield _vote(leaf, dim, f"puts out the {shape[dim]} tokens of the table")
    elif leaf.name.word is Word.HEAD and shape[dim] >= FEWEST_TOKENS and shape[dim] > lone:
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
