"""Votes -> one claim per parameter."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from jaxtp.errors import ConflictingDecisions, Problems
from jaxtp.plan.trees import Param
from jaxtp.rules.roles import Placement, Role, Vote


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """What a parameter should get, before the mesh has a say.

    Attributes:
        param: The parameter.
        vote: The winning vote.
        reasons: One sentence per source, the winner's last.
        overruled: Weaker votes that knew better and wanted something else.
        stacked_dims: Dims that count the layers of a stack, by the strongest source that saw any:
            who decides on the tensor axis (an override, names where the dataflow saw nothing) need
            not know of stacks.
    """

    param: Param
    vote: Vote
    reasons: tuple[str, ...]
    overruled: tuple[Vote, ...] = ()
    stacked_dims: tuple[int, ...] = ()

    @property
    def forgone(self) -> Placement | None:
        """What the evidence that is overruled would have sharded first."""
        return next((p for v in self.overruled for p in v.placements if p is not None), None)


def decide(params: Mapping[str, Param], votes: Iterable[Vote]) -> list[Claim]:
    """One claim per parameter, in the tree's order.

    A stronger vote that agrees on the dim but knows nothing about units or group takes these from
    the weaker one: an annotation says where, names may still say how many heads that is.

    Raises:
        ConflictingDecisions: TP001, if votes of equal strength disagree.
    """
    by_path: defaultdict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        by_path[vote.path].append(vote)
    problems = Problems()
    claims: list[Claim] = []
    for path, param in params.items():
        # A source that saw nothing ("unknown") has no say against one that did.
        ranked = sorted(by_path[path], key=lambda v: (v.role is not Role.UNKNOWN, v.source))
        winner = ranked[-1]
        for other in ranked[:-1]:
            if other.source == winner.source and not agree(other, winner):
                problems.add(
                    ConflictingDecisions(
                        f"{winner.source.name.lower()} disagree: {_text(other)}; {_text(winner)}",
                        where=path,
                        fix=f"overrides={{r'^{path}$': PartitionSpec(...)}} settles it",
                    )
                )
            winner = _refined(winner, other)
        reasons = tuple(_reason(v, winner) for v in ranked)
        overruled = tuple(v for v in ranked if _overrules(winner, v))
        claims.append(Claim(param, winner, reasons, overruled, _stacked(ranked)))
    problems.raise_any()
    return claims


def _stacked(ranked: list[Vote]) -> tuple[int, ...]:
    """Layer dims by the strongest vote that has any, less those that a stronger one splits."""
    for n, vote in enumerate(reversed(ranked)):
        if vote.stacked_dims:
            stronger = ranked[len(ranked) - n :]
            split = {p.dim for v in stronger for p in v.placements if p is not None}
            return tuple(d for d in vote.stacked_dims if d not in split)
    return ()


def agree(a: Vote, b: Vote) -> bool:
    """Whether two votes want the same dim on the tensor axis.

    Choices are compared, not lists of them: what to take where the first does not divide is known
    to one source and not to another, and not knowing it is no opinion.
    """
    return a.spec == b.spec and choice_of(a) == choice_of(b)


def choice_of(vote: Vote) -> int | None:
    """The dim that a vote would split, if it divides; None to replicate the parameter."""
    return next((placement and placement.dim for placement in vote.placements), None)


def _refined(winner: Vote, other: Vote) -> Vote:
    if winner.spec is not None:
        return dataclasses.replace(winner, group=other.group or winner.group)
    if winner.group or not agree(winner, other):
        return winner
    role = other.role if winner.role is Role.GIVEN else winner.role
    pairs = itertools.zip_longest(winner.placements, other.placements)
    placements = tuple(_finer(*pair) for pair in pairs)[: len(winner.placements)]
    return dataclasses.replace(winner, role=role, placements=placements, group=other.group)


def _finer(mine: Placement | None, theirs: Placement | None) -> Placement | None:
    """The placement with fewer, larger units: cutting between them is legal for both."""
    if mine is None or theirs is None:
        return mine
    return theirs if math.prod(theirs.units) < math.prod(mine.units) else mine


def _overrules(winner: Vote, vote: Vote) -> bool:
    """Whether a weaker vote with an opinion of its own wanted something else.

    That an array is a norm's or a convolution's says nothing of what it normalises or connects.
    """
    unread = (Role.FUSED, Role.NORM, Role.CONV)
    guess = vote.role is Role.UNKNOWN or (vote.role in unread and not vote.placements)
    return vote.source < winner.source and not guess and not agree(vote, winner)


def _reason(vote: Vote, winner: Vote) -> str:
    mark = " (overruled)" if _overrules(winner, vote) else ""
    return f"{vote.source.name.lower()}: {vote.reason}{mark}"


def _text(vote: Vote) -> str:
    where = ", ".join(f"dim {p.dim}" for p in vote.placements if p) or "replicated"
    return f"{vote.reason} -> {vote.spec or where}"
