"""Layers assigned to stages: all of them, in order, none waiting for longer than it must."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtp.errors import BadStages
from jaxtp.plan.stages import Stages


def test_layers_that_do_not_divide_are_dealt_out():
    assert Stages.even(30, 4, micro_batches=4).layers == ((8, 8, 7, 7),)


def test_rounds_go_around_all_stages():
    stages = Stages.even(8, 2, micro_batches=4, num_rounds=2)
    assert stages.layers == ((2, 2), (2, 2))
    # Stored by stage: the first stage has layers 0, 1 and 4, 5.
    assert stages.pieces == ((0, 2), (4, 2), (2, 2), (6, 2))


@given(
    num_layers=st.integers(1, 60),
    shares=st.lists(st.sampled_from([0.5, 1.0, 1.7, 3.2]), min_size=1, max_size=6),
    num_rounds=st.integers(1, 3),
)
def test_every_layer_runs_once_and_pieces_are_in_order(num_layers, shares, num_rounds):
    if num_layers < len(shares) * num_rounds:
        return
    stages = Stages.shared(num_layers, shares, micro_batches=len(shares) * 2, num_rounds=num_rounds)
    ranges = [range(first, first + count) for first, count in stages.pieces]
    assert sorted(itertools.chain(*ranges)) == list(range(num_layers))
    assert stages.num_layers == num_layers
    assert all(0 < count <= stages.block for _, count in stages.pieces)


@given(
    num_layers=st.integers(3, 9),
    shares=st.lists(st.floats(0.2, 5), min_size=1, max_size=3),
)
def test_no_other_deal_has_a_shorter_longest_stage(num_layers, shares):
    (counts,) = Stages.shared(num_layers, shares, micro_batches=len(shares)).layers

    def longest(counts):
        return max(n / share for n, share in zip(counts, shares, strict=True))

    others = itertools.product(range(1, num_layers + 1), repeat=len(shares))
    best = min(longest(other) for other in others if sum(other) == num_layers)
    assert longest(counts) == pytest.approx(best)


def test_bubble_is_idle_ticks_of_all():
    assert Stages.even(8, 4, micro_batches=4).bubble == 3 / 7
    assert Stages.even(8, 4, micro_batches=4, num_rounds=2).bubble == 3 / 11


@pytest.mark.parametrize(
    ("arguments", "where", "fix"),
    [
        ((8, 4, 3, 1), "micro_batches", "micro_batches of 4"),
        ((8, 4, 6, 2), "micro_batches", "micro_batches of 4, 8"),
        ((3, 4, 4, 1), "pp", "at most pp=3"),
        ((7, 2, 4, 4), "pp", "rounds of 1, 2, 3"),
    ],
)
def test_what_would_deadlock_elsewhere_is_refused(arguments, where, fix):
    num_layers, num_stages, micro_batches, num_rounds = arguments
    with pytest.raises(BadStages, match=r"micro-batches|layers for") as caught:
        Stages.even(num_layers, num_stages, micro_batches=micro_batches, num_rounds=num_rounds)
    assert caught.value.where == where
    assert caught.value.fix == fix
