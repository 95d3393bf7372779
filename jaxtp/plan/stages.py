"""Pipeline stages as data: which layers each one runs, and when.

No device is touched.

With one round this is GPipe (Huang et al. 2019): stage s works on micro-batch t - s at tick t. With
more, layers are assigned in rounds and micro-batches go around the stages once a round, the
interleaved schedule of Narayanan et al. 2021, section 2.2, which divides the idle time by the
number of rounds. One formula covers both, see `jaxtp.layers.stacked`.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxtp.errors import BadStages, join


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """How layers are assigned to pipeline stages.

    Attributes:
        layers: Layers of each chunk, `layers[round][stage]`. The model's first layers are chunk
            (0, 0), the next ones chunk (0, 1), and so on, round after round.
        micro_batches: Parts of the batch that follow each other through the stages.
    """

    layers: tuple[tuple[int, ...], ...]
    micro_batches: int

    def __str__(self) -> str:
        """Layers of each stage, micro-batches, and the bubble."""
        return (
            f"{self.num_stages} stages of {self.layers_text}, {self.micro_batches} micro-batches; "
            f"each idles {self.bubble:.1%} of the time"
        )

    @property
    def layers_text(self) -> str:
        """Layers of each stage, round after round."""
        return " + ".join(join(around, limit=32) for around in self.layers) + " layers"

    @property
    def num_stages(self) -> int:
        """Devices along the pp axis."""
        return len(self.layers[0])

    @property
    def num_rounds(self) -> int:
        """How often a micro-batch goes around all stages."""
        return len(self.layers)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(map(sum, self.layers))

    @property
    def block(self) -> int:
        """Layers of the largest chunk; each chunk is stored with this many, zeros behind."""
        return max(map(max, self.layers))

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """`(first layer, layers)` of each chunk, in the order in which chunks are stored.

        Stage by stage and, within one, round by round: sharding the stored dim over the pp
        axis gives each stage its own chunks.
        """
        sizes = [count for around in self.layers for count in around]
        starts = list(itertools.accumulate(sizes, initial=0))
        order = (
            around * self.num_stages + stage
            for stage in range(self.num_stages)
            for around in range(self.num_rounds)
        )
        return tuple((starts[chunk], sizes[chunk]) for chunk in order)

    @property
    def num_ticks(self) -> int:
        """Chunks that a stage has time for in one pass over the batch."""
        return self.num_rounds * self.micro_batches + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """Share of its time that a stage idles, if chunks take equally long: idle ticks of all.

        (S - 1) / (vM + S - 1) with S stages, v rounds and M micro-batches (Narayanan et al. 2021,
        section 2.2, there as a ratio to the busy time).
        """
        return (self.num_stages - 1) / self.num_ticks

    @classmethod
    def even(
        cls, num_layers: int, num_stages: int, *, micro_batches: int, num_rounds: int = 1
    ) -> "Stages":
        """Layers assigned as evenly as they go, larger chunks first: 30 over 4 is 8, 8, 7, 7.

        Raises:
            BadStages: TP074, whatever `shared` raises.
        """
        return cls.shared(
            num_layers, [1.0] * num_stages, micro_batches=micro_batches, num_rounds=num_rounds
        )

    @classmethod
    def shared(
        cls, num_layers: int, shares: Sequence[float], *, micro_batches: int, num_rounds: int = 1
    ) -> "Stages":
        """Layers assigned in proportion to what each stage can carry.

        Each layer goes where it adds least to the longest time: to the chunk with the smallest
        (layers + 1) / share, the first of equals. No other assignment has a shorter longest chunk.

        Args:
            num_layers: Layers of the model.
            shares: Of each stage, in any unit: FLOP/s, or bytes of memory.
            micro_batches: Pieces of the batch.
            num_rounds: Chunks of each stage.

        Raises:
            BadStages: TP074, if a chunk would be empty, there are fewer micro-batches than stages,
                or several rounds and micro-batches that are no multiple of the stages.
        """
        num_stages = len(shares)
        num_chunks = num_stages * num_rounds
        if num_rounds < 1 or num_layers < num_chunks:
            legal = range(1, num_layers // num_stages + 1)
            raise BadStages(
                f"{num_layers} layers for {num_stages} stages x {num_rounds} rounds",
                where="pp",
                fix=f"rounds of {join(legal)}" if legal else f"at most pp={num_layers}",
            )
        check_micro_batches(micro_batches, num_stages, num_rounds)
        counts = [1] * num_chunks
        for _ in range(num_layers - num_chunks):
            chunk = min(range(num_chunks), key=lambda c: (counts[c] + 1) / shares[c % num_stages])
            counts[chunk] += 1
        rounds = range(0, num_chunks, num_stages)
        layers = tuple(tuple(counts[first : first + num_stages]) for first in rounds)
        return cls(layers=layers, micro_batches=micro_batches)


def check_micro_batches(micro_batches: int, num_stages: int, num_rounds: int) -> None:
    """Refuses what would leave a stage without work or wait for ever.

    Raises:
        BadStages: TP074, with fewer micro-batches than stages, or several rounds and micro-batches
            that are no multiple of the stages.
    """
    if micro_batches >= num_stages and (num_rounds == 1 or micro_batches % num_stages == 0):
        return
    need = "at least as many" if num_rounds == 1 else "a multiple"
    rounds = "one round" if num_rounds == 1 else f"{num_rounds} rounds"
    below = micro_batches // num_stages * num_stages
    near = [n for n in (below, below + num_stages) if n]
    raise BadStages(
        f"{micro_batches} micro-batches for {num_stages} stages in {rounds}; it takes {need}",
        where="micro_batches",
        fix=f"micro_batches of {join(near)}",
    )
