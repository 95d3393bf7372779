"""Gradients of a layer, reduced over replicas beside the turns of the layer in front."""

from collections.abc import Sequence

import jax

from jaxtp.activations.ahead.weights import Weights
from jaxtp.plan.trees import PyTree, leaves, map_with_path

Key = tuple[int, str]
"""Number of a branch, and the path of a weight in its block."""

Held = tuple[dict[Key, jax.Array], dict[Key, jax.Array]]
"""What has arrived, and what does not leave before."""


class Reductions:
    """Gradients on their way, in portions of about equal bytes, one after the other."""

    def __init__(
        self, all_weights: Sequence[Weights], partial: Sequence[PyTree], ends: Sequence[int]
    ) -> None:
        """Nothing moves yet.

        Args:
            all_weights: Of each branch.
            partial: Gradients of each branch, by replica; empty if there are none.
            ends: Of each portion the turn by whose end it has arrived.
        """
        self.all_weights, self.partial, self.arrived = all_weights, partial, dict[Key, jax.Array]()
        waiting = {(i, path): g for i, tree in enumerate(partial) for path, g in leaves(tree)}
        total, before = sum(g.size for g in waiting.values()), 0
        self.portions: dict[int, dict[Key, jax.Array]] = {end: {} for end in ends}
        for key, g in waiting.items():
            # By where its middle lies.
            number = int((before + g.size / 2) * len(ends) / total)
            self.portions[ends[number]][key] = g
            before += g.size

    def held(self, turn: int) -> Held:
        """What a barrier at the end of this turn has to hold, for `let_go`."""
        portion = self.portions.get(turn, {})
        reduced = {
            key: self.all_weights[key[0]].reduce({key[1]: g})[key[1]] for key, g in portion.items()
        }
        later = [self.portions[end] for end in self.portions if portion and end > turn]
        return reduced, {key: g for one in later for key, g in one.items()}

    def let_go(self, turn: int, held: Held) -> None:
        """Takes what the barrier gave back."""
        self.arrived |= held[0]
        for end, portion in self.portions.items():
            self.portions[end] = {key: held[1].get(key, g) for key, g in portion.items()}

    def trees(self) -> list[PyTree]:
        """All that have arrived, by branch."""
        return [
            map_with_path(lambda path, _, i=i: self.arrived[i, path], tree)
            for i, tree in enumerate(self.partial)
        ]
