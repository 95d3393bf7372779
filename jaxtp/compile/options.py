"""Compile options: what to ask of XLA, spelled for the jaxlib that is installed.

Options are passed per compile and never through `XLA_FLAGS`: there, one unknown name stops the
process with a fatal check, while a compile option only raises. Names come and go between jaxlib
versions, so each one is tried on a trivial program first; the option table is the same on every
backend, so a laptop can ask what a cluster will be given.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

import jax

from jaxtp.errors import BadOption, join
from jaxtp.errors.arguments import FLAG, Kind, checked, one_of, whole
from jaxtp.hardware.links import MIB

Value = bool | int | float | str
Overlap = Literal["off", "auto", "aggressive"]

OVERLAP: Mapping[str, Mapping[str, Value]] = {
    # Every collective becomes synchronous: the baseline that overlap is measured against.
    "off": {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"},
    # XLA's latency-hiding scheduler as it comes; it is on by default.
    "auto": {},
    # By default the scheduler hides all-reduces behind asynchronous copies and believes that it is
    # done; and past its own memory estimate, which a deep stack always passes, it makes nearly
    # everything synchronous. The second option removes that guard, so preflight compares the
    # real peak with the GPU's memory; 200 is not enough beside an Adam state that fills half of it
    # (0% hidden at 80 layers of llama3-70b, 34% from 400 on). The first one exists since jaxlib
    # 0.11.2. One collective at a time would make those synchronous that share their time: several
    # gathers of a layer, or a gather over the network beside an all-reduce over NVLink. With more
    # than 5 at a time the gathers of a backward pass crowd together at its end.
    "aggressive": {
        "xla_gpu_experimental_enable_selective_memcpy_overlap": True,
        "xla_gpu_memory_limit_slop_factor": 1000,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 5,
        # On simulated devices nothing hides, and a collective that waits holds one of few threads;
        # with jax 0.10 the two halves' may hold all of them and wait for ever.
        "xla_cpu_enable_concurrency_optimized_scheduler": False,
    },
}

FUSED_BYTES = 128 * MIB
"""Combine threshold for `gradient_fusion=True`; XLA's own default is 30 MiB."""

COMBINED = ("all_reduce", "all_gather", "reduce_scatter")

PREFLIGHT: Mapping[str, Value] = {
    # Without a GPU there is nothing to autotune on, and untuned Triton products get tiny tiles.
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": 0,
}
"""What preflight adds so that the compiler does not look for a GPU to measure on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options for one compile.

    Attributes:
        options: Accepted by this jaxlib; pass as `compiler_options=`.
        unknown: Asked for, but unknown to this jaxlib; left out.
    """

    options: Mapping[str, Value]
    unknown: Mapping[str, Value]

    def __or__(self, other: "CompileOptions") -> "CompileOptions":
        return CompileOptions(
            options={**self.options, **other.options}, unknown={**self.unknown, **other.unknown}
        )


OPTIONS = Kind(
    lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and all(isinstance(option, bool | int | float | str) for option in value.values())
    ),
    "a dict of names and numbers or text, as XLA's DebugOptions have them",
    BadOption,
)
"""What functions take as compile options."""

BYTES = whole(0, 2**63 - 1)


@checked(
    overlap=one_of(*OVERLAP).raising(BadOption),
    gradient_fusion=Kind(
        lambda value: FLAG.accepts(value) or BYTES.accepts(value), "True, False or bytes", BadOption
    ),
    extra=OPTIONS.or_none(),
)
def compile_options(
    *,
    overlap: Overlap = "auto",
    gradient_fusion: bool | int = True,
    extra: Mapping[str, Value] | None = None,
) -> CompileOptions:
    """The compile options that stand for the communication settings.

    Args:
        overlap: `off` makes every collective synchronous, `auto` leaves XLA's scheduler as it is,
            `aggressive` lets it plan past its own memory estimate.
        gradient_fusion: Whether small reductions and gathers are combined into one message; a
            number is the largest combined message in bytes per device.
        extra: More options by their field name in XLA's `DebugOptions`; these win.

    Raises:
        BadOption: TP110, for a value that a known option, or a setting, cannot take.
    """
    switch = isinstance(gradient_fusion, bool)
    bucket = gradient_fusion * FUSED_BYTES if switch else gradient_fusion
    wanted: dict[str, Value] = {
        f"xla_gpu_{kind}_combine_threshold_bytes": bucket for kind in COMBINED
    }
    return probe({**wanted, **OVERLAP[overlap], **(extra or {})})


def probe(wanted: Mapping[str, Value]) -> CompileOptions:
    """Sorts options into those that this jaxlib takes and those that it does not know.

    Raises:
        BadOption: TP110, if it knows an option but refuses the value.
    """
    known = {name: value for name, value in wanted.items() if _accepted(name, value)}
    unknown = {name: value for name, value in wanted.items() if name not in known}
    return CompileOptions(options=known, unknown=unknown)


# One process has one jaxlib. Typed, because an option may take False but not 0.
@functools.lru_cache(maxsize=None, typed=True)
def _accepted(name: str, value: Value) -> bool:
    # A literal keeps the trivial program free of arguments and devices.
    lowered = jax.jit(lambda: 0).lower()
    try:
        lowered.compile({name: value})
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "No such compile option" in text:
            return False
        if "not a valid" in text:
            raise BadOption(
                f"{name} cannot be {value!r}: {text.splitlines()[0]}",
                where=name,
                fix="booleans as True or False, enums by their full upper-case name",
            ) from None
        raise
    return True


def describe(options: CompileOptions) -> str:
    """One line for a report: what is used, and what was left out."""
    used = join([f"{name}={value}" for name, value in options.options.items()], limit=20)
    left = join(options.unknown, limit=20)
    return (used or "none") + (f"; unknown to this jaxlib: {left}" if left else "")
