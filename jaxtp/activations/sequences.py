"""Sequences that devices along cp share, in models that never heard of it.

Every value with tokens has them sharded over cp. A product of two such values is the one place
where a device needs tokens that it does not have: of queries and keys the keys, of weights and
values the values, are gathered in front of it, where they are narrowest. What is gathered is not
kept for the backward pass, which gathers it again.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh

from jaxtp.activations.attentions import Attentions, Frame
from jaxtp.activations.fused_products import joined
from jaxtp.activations.row_chunks import TokenProduct
from jaxtp.errors import IdleDevices, SizeMismatch
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import Plan
from jaxtp.rules.jaxpr import Analysis
from jaxtp.rules.jaxpr.classes import Dim, dim_size, resolve
from jaxtp.rules.jaxpr.reentry import bind
from jaxtp.rules.jaxpr.trails import dim_before, follow, steps_of
from jaxtp.rules.jaxpr.walk import Kind, Scope, Value

Place = Callable[[Any], Any]

GATHERED = "jaxtp_keys_and_values"
"""Scope of the gathers that are meant; preflight asks about any other one along cp."""


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """A product of two activations, one of which is needed with all of its tokens.

    Attributes:
        gathered: Which operand that is: 0 or 1.
        along: Its dim of tokens.
        kept: The dim of tokens of the other operand, which stays sharded.
        result: The same dim in the result.
        is_scores: Whether the result has a dim for the tokens of each.
    """

    gathered: int
    along: int
    kept: int
    result: int
    is_scores: bool


class Sequences:
    """Which dims are tokens, and what products of them need."""

    def __init__(self, analysis: Analysis, plan: Plan, mesh: Mesh | AbstractMesh) -> None:
        self._analysis = analysis
        name = plan.mesh.name_of(Axis.CP)
        self.axis = name if name and plan.mesh[name] > 1 else ""
        self._replicas = plan.mesh.batch_ways
        self.ways = plan.mesh.size_of(Axis.CP)
        self._frames: list[Frame] = []
        self._recomputed = 0
        self._meetings: dict[tuple[Scope, int], Meeting | None] = {}
        self.attentions = Attentions(mesh, self.axis)

    @property
    def axes(self) -> tuple[str, ...]:
        """cp, if the mesh has devices along it."""
        return (self.axis,) if self.axis else ()

    def axes_of(self, dim: Dim) -> tuple[str, ...]:
        """The axes that shard a dim: cp if it leads with tokens."""
        is_shared = bool(self.axes) and self._analysis.is_sequence(dim)
        return self.axes if is_shared and dim_size(dim) % self.ways == 0 else ()

    def is_position(self, dim: Dim) -> bool:
        """Whether a dim counts tokens or rows of a batch."""
        return self._analysis.is_batch(dim) or self._analysis.is_sequence(dim)

    def is_behind_rows(self, dim: Dim) -> bool:
        """Whether a dim is tokens behind rows of a batch, of which a device has more than one."""
        first, *rest = [(atom,) for atom in resolve(dim)] or [()]
        several = self._analysis.is_batch(first) and dim_size(first) > self._replicas
        return several and any(map(self._analysis.is_sequence, rest))

    @contextlib.contextmanager
    def running(self, scope: Scope, position: int, known: Mapping[Any, Any]) -> Generator[None]:
        """While an equation runs."""
        frame = Frame(scope, position, known)
        self._frames.append(frame)
        self.attentions.enter(frame)
        try:
            yield
            ends = self.meeting(scope, frame.equation) is not None
            self.attentions.leave(frame, ends=ends)
        finally:
            self._frames.pop()

    @contextlib.contextmanager
    def recomputing(self) -> Generator[None]:
        """While a program is traced whose values are computed again in the backward pass."""
        self._recomputed += 1
        try:
            yield
        finally:
            self._recomputed -= 1

    def meeting(self, scope: Scope, equation: Any) -> Meeting | None:
        """What a product needs gathered; None if each device has all that it multiplies."""
        if not self.axes or equation.primitive.name != "dot_general":
            return None
        key = scope, id(equation)
        if key not in self._meetings:
            self._meetings[key] = self._find_meeting(scope, equation)
        return self._meetings[key]

    def _find_meeting(self, scope: Scope, equation: Any) -> Meeting | None:
        values = [None if isinstance(v, Literal) else scope.values.get(v) for v in equation.invars]
        if not any(v is not None and v.kind is Kind.ACTIVATION for v in values):
            return None
        if any(v is not None and v.kind is Kind.PARAMETER for v in values):
            return None
        free = [self._free(equation, side, value) for side, value in enumerate(values)]
        summed = self._summed(equation, values)
        if all(free):
            # Queries and keys: what is reduced next, by the softmax, runs over keys.
            tokens = {free[side][0][1]: side for side in (0, 1)}
            reduced = self._reduced_next(equation, set(tokens))
            keys = 1 if reduced is None else tokens[reduced]
            return Meeting(keys, free[keys][0][0], *free[1 - keys][0], is_scores=True)
        if summed is not None and any(free):
            weights = 0 if free[0] else 1
            return Meeting(1 - weights, summed[1 - weights], *free[weights][0], is_scores=False)
        return None

    def product(
        self,
        equation: Any,
        operands: Sequence[Any],
        meeting: Meeting,
        gather: Callable[[Any, Value, int, bool], Any],
        place: Place,
    ) -> TokenProduct:
        """A product, with one operand gathered where it is narrowest.

        Args:
            equation: The product.
            operands: What it takes.
            meeting: What of it is gathered.
            gather: `(x, value, dim, widens)` -> `x` with all tokens on every device; `widens` if
                it is repeated more than twice before the product, see `gather_tokens`.
            place: Constrains the result, or some rows of it.
        """
        x, value, dim, steps = self._narrowest(equation, meeting)
        widens = operands[meeting.gathered].nbytes > 2 * x.nbytes

        def other() -> Any:
            y = gather(x, value, dim, widens)
            for step in steps:
                y = bind(step, [v.val if isinstance(v, Literal) else y for v in step.invars])[0]
            return y

        side = 1 - meeting.gathered
        return TokenProduct(
            equation, operands[side], meeting.kept, side, other, meeting.result, place
        )

    def result(self, product: TokenProduct, scored: Scope | None, ways: int) -> Any:
        """What a product gives; one with values for some queries at a time, if there are many.

        Args:
            product: The product.
            scored: Where it is, if it makes scores.
            ways: Devices that hold parts of the result.
        """

        def at_once() -> Any:
            return product.run(product.rows, product.other())

        run = self.attentions.in_chunks(self._frames, product) or at_once
        result = run() if self._recomputed else jax.checkpoint(run)()
        if scored is not None:
            self.attentions.made(scored, product, result.nbytes // ways)
        return result

    def _free(self, equation: Any, side: int, value: Value | None) -> list[tuple[int, int]]:
        """(dim, its place in the result) of the tokens of one operand that are not summed."""
        if value is None:
            return []
        contracted, paired = equation.params["dimension_numbers"]
        taken = {*contracted[side], *paired[side]}
        own = [dim for dim in range(len(value.dims)) if dim not in taken]
        first = len(paired[0])
        if side == 1:
            first += len(equation.invars[0].aval.shape) - len(contracted[0]) - len(paired[0])
        return [
            (dim, first + place) for place, dim in enumerate(own) if self.axes_of(value.dims[dim])
        ]

    def _summed(self, equation: Any, values: Sequence[Value | None]) -> tuple[int, int] | None:
        """The dim of each operand that a product sums over, if these are tokens."""
        contracted, _ = equation.params["dimension_numbers"]
        for pair in zip(*contracted, strict=True):
            for dim, value in zip(pair, values, strict=True):
                if value is not None and self.axes_of(value.dims[dim]):
                    return pair
        return None

    def _reduced_next(self, equation: Any, dims: set[int]) -> int | None:
        """Which of some dims of the result under way is reduced first, by a sum or a product."""
        tracked = {dim: dim for dim in dims}
        var = equation.outvars[0]
        for frame in reversed(self._frames):
            found, var, tracked = follow(frame.scope, frame.position + 1, var, tracked)
            if found is not None or var is None:
                return found
            callers = self._frames[: self._frames.index(frame)]
            if not callers or not callers[-1].is_inline:
                return None
            var = callers[-1].equation.outvars[var]
        return None

    def _narrowest(self, equation: Any, meeting: Meeting) -> tuple[Any, Value, int, list[Any]]:
        """Where an operand has fewest bytes on its way here, and the equations from there on.

        Repeating the heads of keys, or a cast of them to a wider type, comes after the gather.
        """
        frames, var = list(self._frames), equation.invars[meeting.gathered]
        dim, steps = meeting.along, list[Any]()
        frame = frames[-1]
        best = (frame.known[var], frame.scope.values[var], dim, 0)
        least = _num_bytes(var.aval)
        while True:
            made = _maker(frame, var)
            if made is None:
                outer = frames[:-1]
                inputs = list(frame.scope.jaxpr.invars)
                if not outer or not outer[-1].is_inline or var not in inputs:
                    break
                frames, frame = outer, outer[-1]
                var = frame.equation.invars[inputs.index(var)]
                if isinstance(var, Literal):
                    break
            else:
                inner = steps_of(made, frame.scope)
                if inner is None:
                    break
                source, passed = inner
                for step in reversed(passed):
                    dim = dim_before(step, dim)
                    if dim is None:
                        break
                if dim is None:
                    break
                steps[:0], var = passed, source
            value = frame.scope.values.get(var)
            if value is None or var not in frame.known or not self.axes_of(value.dims[dim]):
                break
            if _num_bytes(var.aval) < least:
                least, best = _num_bytes(var.aval), (frame.known[var], value, dim, len(steps))
        x, value, dim, count = best
        return joined(x), value, dim, steps[len(steps) - count :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_tokens(split: Place, whole: Place, x: Any) -> Any:
    """An array gathered by a constraint, whose gradient is reduced and scattered in one.

    A constraint alone would ask for its gradient as it asks for itself: on every device, an
    all-reduce of twice the bytes. But it is reduced where the product made it: of heads repeated
    more than twice that all-reduce, behind the sum over the repeats, sends less.

    Args:
        split: Constrains an array to its shards.
        whole: Constrains it to be replicated.
        x: The array.
    """
    with jax.named_scope(GATHERED):
        return whole(split(x))


gather_tokens.defvjp(
    lambda split, whole, x: (gather_tokens(split, whole, x), None),
    lambda split, whole, _, gradient: (split(gradient),),
)


def check_tokens(analysis: Analysis, plan: Plan) -> None:
    """Refuses a function whose sequences devices along cp cannot share.

    Raises:
        IdleDevices: TP011, if it has none.
        SizeMismatch: TP003, if one does not divide.
    """
    ways, name = plan.mesh.size_of(Axis.CP), plan.mesh.name_of(Axis.CP)
    if not analysis.tokens:
        raise IdleDevices(
            f"no residual sum of this function has a dim of tokens: {ways} devices would do the "
            "same work",
            where=name,
            fix="give the devices to dp, fsdp or tp; a single sequence needs a batch of 1 in front",
        )
    for size in filter(lambda size: size % ways, map(dim_size, analysis.tokens)):
        near = max(size // ways, 1) * ways
        raise SizeMismatch(
            f"{name}={ways} does not divide {size} tokens",
            where="tokens",
            fix=f"a multiple of {ways}, such as {near} or {near + ways}",
        )


def _num_bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _maker(frame: Frame, var: Any) -> Any:
    """The position and the equation that made a variable of a frame's jaxpr, or None."""
    for position in range(frame.position - 1, -1, -1):
        if var in frame.scope.jaxpr.eqns[position].outvars:
            return position, frame.scope.jaxpr.eqns[position]
    return None
