"""How published checkpoints describe a model: names of tensors, fields of a config.json.

In: what an architecture declares. Out: `Stored` rows and `Family` rows; no file is read here.

One row per parameter: the tensor's name, with `{}` for each leading dim of the parameter that is
separate tensors in the file (layers, then experts), and the dims of one tensor as stored and as the
model has them. Parentheses are one stored dim that the model has as several, major to minor.
PyTorch's linear layers store (out, in), GPT-2's (in, out).
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtp.errors import UnsupportedModel

Fields = Mapping[str, Any]
"""Fields of a config.json."""


class Stored(NamedTuple):
    """How a checkpoint stores one parameter.

    Attributes:
        name: Name of a tensor, with `{}` for each leading dim of the parameter.
        dims: Dims of one tensor as stored -> as the model has them; without an arrow they agree.
        part: Which part of the tensor it is, where several parameters of one tensor lie one after
            the other along its first dim.
        after: Path of the stack of layers that are numbered in front of this parameter's, if there
            is one.
        in_turns: How many parameters of one tensor take turns along its last dim, in place of
            lying one after the other; `part` says which of them it is.
    """

    name: str
    dims: str
    part: int = 0
    after: str = ""
    in_turns: int = 1


class Storage(NamedTuple):
    """A parameter's dims as stored, in sizes.

    Attributes:
        stack: Sizes of the leading dims that are separate tensors.
        shape: One tensor's shape in the file.
        split: The same with merged dims apart.
        order: Which dim of `split` each further dim of the parameter is.
        first: Rows of the tensor in front of this parameter's, where it is one of several parts.
        rows: Rows of the whole tensor.
        before: Layers that are numbered in front of the first one.
        turn: Which element of its last dim is the first of this parameter's, and after how many
            the next one is.
    """

    stack: tuple[int, ...]
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    first: int
    rows: int
    before: int
    turn: tuple[int, int] = (0, 1)

    def numbers(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """What stands in the tensor's name for an index into `stack`."""
        return (index[0] + self.before, *index[1:]) if self.before else index

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the tensor, all parts together."""
        *front, last = (self.rows, *self.shape[1:])
        return (*front, last * self.turn[1])


def _as_given(fields: Fields, where: str) -> Fields:
    return fields


def _nothing(given: Fields, where: str) -> Fields:
    return {}


def _no_fields(config: Any) -> Fields:
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face, and how its config.json says what ours says.

    Attributes:
        architecture: The class of `transformers` that loads it.
        names: Parameter path -> how it is stored; a model has some of these.
        fields: Their field -> ours, where both mean the same.
        defaults: What `transformers` takes for fields that a file leaves out; others are required.
        constants: Our fields that the family fixes.
        harmless: Fields that our models do not have -> the value at which they change nothing.
        types: Type of a field, where it is not that of ours or there is none of ours.
        same: Pairs of fields with one meaning: a file that has both must not contradict itself.
        merge: (fields of a file, its path) -> the same with several spellings as one; refuses two
            that say different things.
        read: (fields with defaults, path of the file) -> values of ours that take more than a copy.
        write: A config -> what `read` reads.
    """

    architecture: str
    names: Mapping[str, Stored]
    fields: Mapping[str, str]
    defaults: Fields
    constants: Fields = dataclasses.field(default_factory=dict[str, Any])
    harmless: Fields = dataclasses.field(default_factory=dict[str, Any])
    types: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    same: tuple[tuple[str, str], ...] = ()
    merge: Callable[[Fields, str], Fields] = _as_given
    read: Callable[[Fields, str], Fields] = _nothing
    write: Callable[[Any], Fields] = _no_fields


HEAD = "lm_head.weight"
"""Never has the prefix of the other names. Files of tied models may hold it; they need not."""

BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
"""Tensors in older files that are no parameters: rotary frequencies and causal masks."""


def refuse(where: str, what: str, fix: str) -> UnsupportedModel:
    """The error about a field of the config.json at `where`."""
    return UnsupportedModel(what, where=where, fix=fix)


def refuse_contradiction(where: str, one: str, other: str) -> UnsupportedModel:
    """The error about two fields with one meaning; both are given with their values."""
    return refuse(
        where, f"{one} contradicts {other}", "keep the one that the weights were made with"
    )


def storages(
    names: Mapping[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
    among: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Storage]:
    """How every parameter of a model is stored.

    Args:
        names: Its family's table.
        shapes: Parameter path -> shape in elements.
        among: The same of all parameters, if `shapes` has not all of them.

    >>> names = {"o": Stored("layers.{}.o.weight", "d (n h) -> n h d")}
    >>> how = storages(names, {"o": (2, 4, 8, 16)})["o"]
    >>> how.stack, how.shape, how.split, how.order
    ((2,), (16, 32), (16, 4, 8), (1, 2, 0))
    """
    fronts = {path.partition("/")[0]: shape[:1] for path, shape in (among or shapes).items()}
    alone: dict[str, Storage] = {}
    for path, shape in shapes.items():
        before = sum(fronts.get(names[path].after, ()))
        alone[path] = _storage(names[path], shape)._replace(before=before)
    parts: dict[tuple[str, int], list[str]] = {}
    for path in sorted(alone, key=lambda path: names[path].part):
        parts.setdefault((names[path].name, alone[path].before), []).append(path)
    found: dict[str, Storage] = {}
    for together in parts.values():
        if alone[together[0]].turn[1] > 1:
            found |= {path: alone[path] for path in together}
            continue
        sizes = [alone[path].shape[0] for path in together]
        for path, first in zip(together, itertools.accumulate(sizes, initial=0), strict=False):
            found[path] = alone[path]._replace(first=first, rows=sum(sizes))
    return {path: found[path] for path in shapes}


def _storage(stored: Stored, shape: tuple[int, ...]) -> Storage:
    num_stacked = stored.name.count("{}")
    left, _, right = stored.dims.partition(" -> ")
    merged = [group.strip("()").split() for group in re.findall(r"\(.*?\)|\S+", left)]
    letters = [letter for group in merged for letter in group]
    model_letters = right.split() or letters
    sizes = dict(zip(model_letters, shape[num_stacked:], strict=True))
    stored_shape = tuple(math.prod(sizes[letter] for letter in group) for group in merged)
    return Storage(
        stack=shape[:num_stacked],
        shape=stored_shape,
        split=tuple(sizes[letter] for letter in letters),
        order=tuple(letters.index(letter) for letter in model_letters),
        first=0,
        rows=stored_shape[0],
        before=0,
        turn=(stored.part if stored.in_turns > 1 else 0, stored.in_turns),
    )
