"""Coded errors: every mistake jaxtp can name has a class, a number that never changes, and a page.

Stage in: nothing. Stage out: the exception classes every other module raises.

A message always says what is wrong with which numbers, where (a parameter path, a config key, a
file), and what would work. `jaxtp errors TP003` prints a class's docstring; codes are grouped in
bands: 001-009 AutoTP's own, 010-019 mesh, 020-039 config, 040-069 plan, 070-089 apply, 090-109
files, 110-129 compiler, 130-149 training and command line.
"""

import inspect
from collections.abc import Iterable
from typing import ClassVar


class JaxtpError(Exception):
    """Root of every error jaxtp raises on purpose.

    Attributes:
        what: One sentence with the numbers that disagree.
        where: A parameter path, a config key or a file; empty when there is no single place.
        fix: What would work, with legal values.
    """

    code: ClassVar[str] = "TP000"
    registry: ClassVar[dict[str, type["JaxtpError"]]] = {}

    def __init_subclass__(cls) -> None:
        if cls.registry.setdefault(cls.code, cls) is not cls:
            raise TypeError(f"{cls.code} is already taken by {cls.registry[cls.code].__name__}")

    def __init__(self, what: str, *, fix: str, where: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        place = f" at {where}" if where else ""
        super().__init__(f"{self.code}{place}: {what}\n  fix: {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException pickles through self.args, which cannot rebuild keyword-only arguments.
        return (_rebuild, (type(self), self.what, self.fix, self.where))


def _rebuild(cls: type[JaxtpError], what: str, fix: str, where: str) -> JaxtpError:
    return cls(what, fix=fix, where=where)


class JaxtpWarning(UserWarning):
    """Something works but costs more than it should; the text starts with a code."""


class ConflictingDecisions(JaxtpError, ValueError):
    """Two sources of equal strength want different things for one parameter.

    Why it matters: choosing silently would give right numbers and a slow program.
    Example: a layer-norm scale that one rule calls "norm" and an override splits, or two overrides
    that match one path with different specs.
    Fix: keep one of the two, or add an override, which outranks every other source.
    """

    code = "TP001"


class CommunicationTimeout(JaxtpError, TimeoutError):
    """A peer did not take part in a collective, a barrier or start-up in time.

    Why it matters: JAX itself waits for ever, at full GPU load and without a log line.
    Fix: look for the process that the message names; set NCCL_DEBUG=WARN and
    NCCL_DEBUG_SUBSYS=INIT,NET,COLL on every process; restart the job, because the device queue of
    the waiting processes stays blocked.
    """

    code = "TP002"


class SizeMismatch(JaxtpError, ValueError):
    """A size does not match, or does not divide over the mesh axes it is placed on.

    Why it matters: JAX reports the same mistake later, from inside a compiled call, without the
    parameter's path.
    Example: vocab 32001 on tp=2; a hidden size that the tensor-parallel size does not divide.
    Fix: use one of the sizes that the message lists, or let jaxtp choose the spec.
    """

    code = "TP003"


class BadMesh(JaxtpError, ValueError):
    """The mesh cannot be built: an unknown axis, or sizes that do not multiply to the devices.

    Fix: `jaxtp.make_mesh(tp=4, dp=-1)`; one axis may be -1 and takes what is left.
    """

    code = "TP010"


class IdleDevices(JaxtpError, ValueError):
    """The mesh uses fewer devices than there are.

    Why it matters: `jax.make_mesh((2, 2), ...)` on eight devices quietly leaves four of them idle.
    Fix: make the product of the sizes equal to the device count, or pass `devices=` explicitly.
    """

    code = "TP011"


class BadTopology(JaxtpError, ValueError):
    """A device kind or its numbers are unknown or impossible.

    Fix: name one of the known kinds, or give FLOP/s, memory and bandwidth in a description file.
    """

    code = "TP012"


class NoTensorAxis(JaxtpError, ValueError):
    """The mesh has no axis for tensor parallelism.

    Example: axes named `data` and `model`; jaxtp looks for `tp`.
    Fix: `axis_names={"tp": "model", "dp": "data"}`.
    """

    code = "TP013"


class BadConfig(JaxtpError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one.

    Fix: the message gives the key's full path and the nearest known key or the legal values.
    """

    code = "TP020"


class UnusedOverride(JaxtpError, KeyError):
    """An override matches no parameter.

    Why it matters: a misspelt pattern would otherwise leave the parameter to the automatic rules.
    Fix: the message lists the closest paths; patterns are regular expressions searched in the path.
    """

    code = "TP040"

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which would escape the newline.
        return str(self.args[0])


class HeadsNotDivisible(JaxtpError, ValueError):
    """A group's units do not divide over the tensor axis, and the policy is `error`.

    Why it matters: a head that lies on two devices needs a gather in every attention product.
    Example: 6 kv heads on tp=4.
    Fix: use tp=2, 3 or 6, or the `factor` policy, which splits attention
    2-way and everything else 4-way.
    """

    code = "TP041"


class NothingSharded(JaxtpError, ValueError):
    """No parameter landed on the tensor axis, so its devices would all do the same work.

    Fix: give the model's sizes (`heads=`, or `config=`), add overrides, or use tp=1. A model of
    convolutions only has nothing to shard with tensor parallelism: use dp or fsdp.
    """

    code = "TP042"


class ReplicatedTooMuch(JaxtpError, ValueError):
    """Matrices that stay whole on every device take more bytes than the budget allows.

    Fix: the message lists the largest with the reason for each; give sizes or overrides for them,
    or raise `replicated_budget`.
    """

    code = "TP043"


class BadSpec(JaxtpError, ValueError):
    """A PartitionSpec cannot apply: too many entries, an unknown axis, or an axis used twice.

    Fix: one entry per dimension, axes of this mesh only, each at most once.
    """

    code = "TP044"


class PlanMismatch(JaxtpError, ValueError):
    """A plan and a tree are not about the same parameters.

    Fix: make the plan from this tree; the message lists the paths or shapes that differ.
    """

    code = "TP045"


class BadTree(JaxtpError, TypeError):
    """A value is not a tree of arrays that jaxtp can read.

    Fix: pass a Linen `params` dict, an `nnx.Module`, an `nnx.State`, a `TrainState` or a tree of
    arrays or `jax.ShapeDtypeStruct`.
    """

    code = "TP046"


class StateNotPlaced(JaxtpError, ValueError):
    """An optimizer-state leaf looks like a parameter's but its shape derives from none of them.

    Fix: give its spec with `state_overrides={regex: PartitionSpec}`.
    """

    code = "TP070"


class ParityFailed(JaxtpError, AssertionError):
    """Sharded and unsharded runs of the same function differ by more than the tolerance.

    Fix: look at the first path in the message; a function that reads `jax.devices()` or draws
    random numbers from a global generator is the usual cause.
    """

    code = "TP071"


class UnknownActivation(JaxtpError, KeyError):
    """`constrain` was given an activation name that no plan knows.

    Fix: use one of the names the message lists.
    """

    code = "TP072"

    def __str__(self) -> str:
        return str(self.args[0])


class NotInterleaved(JaxtpError, RuntimeError):
    """`overlap="aggressive"` was asked for, and the layers cannot run in two halves of the batch.

    Why it matters: they run one after the other instead, with the same numbers, and the all-reduces
    of the forward pass stay exposed. Models warn with this text.
    Example: one sequence per replica; sequence parallelism; 12 heads on tp=8; experts.
    Fix: an even number of sequences per replica, heads and widths that divide over all of tp, and
    `remat="block_outputs"`.
    """

    code = "TP073"


class BadCheckpoint(JaxtpError, ValueError):
    """A checkpoint is missing, damaged, or holds another model.

    Fix: the message lists what differs; restore with the model that was saved.
    """

    code = "TP090"


class BadWeights(JaxtpError, ValueError):
    """A Hugging Face folder is damaged, or holds other tensors than its config asks for.

    Why it matters: every header is checked against its file and the model before any array is
    placed, so a truncated download is found in milliseconds and nothing half-loaded stays behind.
    Example: a tensor whose bytes lie outside of the file or are not numbers; a missing layer.
    Fix: the message names the file and the tensor; download that file again.
    """

    code = "TP095"


class UnsupportedModel(JaxtpError, ValueError):
    """A Hugging Face config asks for something that jaxtp's models do not compute.

    Why it matters: loading anyway would give a model that runs and answers wrongly.
    Example: `rope_scaling` of type yarn; a sliding window in some layers only; quantised weights.
    Fix: the message names the field and the values that are supported.
    """

    code = "TP096"


class BadOption(JaxtpError, ValueError):
    """A compile option has a value that this jaxlib refuses.

    Fix: the message names the option, the value and the values it takes.
    """

    code = "TP110"


class CompilerCrashed(JaxtpError, RuntimeError):
    """The GPU compiler stopped its process instead of raising.

    Why it happens: XLA aborts on internal checks; preflight compiles in a subprocess so that yours
    survives.
    Fix: the message carries the last lines of the log; `overlap="off"` avoids the structures that
    crash most.
    """

    code = "TP111"


class CompilerTimeout(JaxtpError, TimeoutError):
    """The GPU compiler did not finish within the time limit.

    Fix: raise `time_limit`, scan over layers instead of unrolling, or compile fewer layers.
    """

    code = "TP112"


class GpuPluginMissing(JaxtpError, ImportError):
    """The GPU compiler is not installed.

    Fix: `pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION`, with the
    version of jax.
    """

    code = "TP113"


class DoesNotFit(JaxtpError, MemoryError):
    """The compiled step needs more memory per GPU than the card has.

    Fix: the message says by how much and which of tp, fsdp, batch, remat or donation would close
    the gap.
    """

    code = "TP114"


class CheckFailed(JaxtpError, AssertionError):
    """A compiled program crosses a limit that `jaxtp.check` was given.

    Fix: the message names the limit, the measured value and the collective sites behind it.
    """

    code = "TP115"


class BadTarget(JaxtpError, ValueError):
    """A preflight target is unknown or malformed.

    Fix: KIND:HOSTSxGPUS or KIND:SLICESxHOSTSxGPUS, for example `h100:1x8`.
    """

    code = "TP116"


class CompileFailed(JaxtpError, RuntimeError):
    """A step cannot be traced, carried to the compiler's process, or compiled for the target.

    Example: arguments on two meshes; cuDNN attention outside of `shard_map`, whose partitioning
    rule is a Python function that no other process has.
    Fix: the message carries what JAX or XLA said; give such a step as `module:function`.
    """

    code = "TP117"


class BadData(JaxtpError, ValueError):
    """The training text is missing or too short for one batch.

    Fix: the message says how many bytes were found and how many one batch needs.
    """

    code = "TP130"


class TrainingDiverged(JaxtpError, FloatingPointError):
    """The loss is not a finite number.

    Fix: lower the learning rate, turn on gradient clipping; the last good checkpoint is untouched.
    """

    code = "TP131"


class BadUsage(JaxtpError, ValueError):
    """A command line or an input file of a command cannot be read.

    Fix: the message names the argument and what it takes.
    """

    code = "TP132"


class BadStep(JaxtpError, TypeError):
    """A train step does not return the state that it was given: other arrays, shapes or types.

    Why it matters: the new state could not take the old one's place, and every step would compile
    again.
    Fix: return `(state, metrics)` or `state`; cast updated parameters back to their own type.
    """

    code = "TP133"


def page(code: str) -> str:
    """The page of one code: its name and docstring.

    Raises:
        BadUsage: TP132, if no such code exists.
    """
    cls = JaxtpError.registry.get(code.upper())
    if cls is None:
        known = ", ".join(sorted(JaxtpError.registry))
        raise BadUsage(f"no error has the code {code!r}", fix=f"known codes: {known}")
    return f"{cls.code} {cls.__name__}\n\n{inspect.getdoc(cls)}"


def join(items: Iterable[object], limit: int = 8) -> str:
    """Items for a message: at most `limit` of them, then how many more there are."""
    listed = [str(item) for item in items]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


class Problems:
    """Collects every problem of one input, so that a user fixes them in one round.

    `raise_any` raises nothing when empty, the error itself when there is one, and otherwise an
    error of the first one's class whose text lists all of them.
    """

    def __init__(self) -> None:
        self.found: list[JaxtpError] = []

    def add(self, error: JaxtpError) -> None:
        """Keeps one problem for `raise_any`."""
        self.found.append(error)

    def raise_any(self) -> None:
        """Raises what was collected; returns when nothing was."""
        if not self.found:
            return
        first = self.found[0]
        if len(self.found) == 1:
            raise first
        rest = "\n".join(f"  - {e!s}" for e in self.found[1:11])
        more = f"\n  - and {len(self.found) - 11} more" if len(self.found) > 11 else ""
        raise type(first)(f"{first.what}\n  also:\n{rest}{more}", fix=first.fix, where=first.where)
