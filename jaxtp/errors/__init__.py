"""Coded errors: every mistake jaxtp can name has a class, a number that never changes, and a page.

In: nothing. Out: the exception classes every other module raises. Never knows: any other room.

A message always says what is wrong with which numbers, where (a parameter path, a config key, a
file), and what would work. `jaxtp errors TP003` prints a class's docstring; codes are grouped in
bands: 001-009 AutoTP's own, 010-019 mesh, 020-039 config, 040-069 plan, 070-089 apply, 090-109
files, 110-129 compiler, 130-149 training and command line.
"""

import inspect

from jaxtp.errors.base import JaxtpError, JaxtpWarning, Problems, join, warn
from jaxtp.errors.planning import (
    BadConfig,
    BadMesh,
    BadProcesses,
    BadSpec,
    BadTopology,
    BadTree,
    CommunicationTimeout,
    ConflictingDecisions,
    HeadsNotDivisible,
    IdleDevices,
    NoTensorAxis,
    NothingSharded,
    PlanMismatch,
    ProcessesDisagree,
    ReplicatedTooMuch,
    SizeMismatch,
    UnhealthyDevice,
    UnusedOverride,
)
from jaxtp.errors.running import (
    BadCheckpoint,
    BadData,
    BadOption,
    BadPrompt,
    BadRunFolder,
    BadStages,
    BadStep,
    BadTarget,
    BadUsage,
    BadWeights,
    CheckFailed,
    CheckpointMismatch,
    CompileFailed,
    CompilerCrashed,
    CompilerTimeout,
    DoesNotFit,
    GpuPluginMissing,
    NotInterleaved,
    ParityFailed,
    RunFolderTaken,
    StateNotPlaced,
    TrainingDiverged,
    UnknownActivation,
    UnsupportedModel,
)

__all__ = [
    "BadCheckpoint",
    "BadConfig",
    "BadData",
    "BadMesh",
    "BadOption",
    "BadProcesses",
    "BadPrompt",
    "BadRunFolder",
    "BadSpec",
    "BadStages",
    "BadStep",
    "BadTarget",
    "BadTopology",
    "BadTree",
    "BadUsage",
    "BadWeights",
    "CheckFailed",
    "CheckpointMismatch",
    "CommunicationTimeout",
    "CompileFailed",
    "CompilerCrashed",
    "CompilerTimeout",
    "ConflictingDecisions",
    "DoesNotFit",
    "GpuPluginMissing",
    "HeadsNotDivisible",
    "IdleDevices",
    "JaxtpError",
    "JaxtpWarning",
    "NoTensorAxis",
    "NotInterleaved",
    "NothingSharded",
    "ParityFailed",
    "PlanMismatch",
    "Problems",
    "ProcessesDisagree",
    "ReplicatedTooMuch",
    "RunFolderTaken",
    "SizeMismatch",
    "StateNotPlaced",
    "TrainingDiverged",
    "UnhealthyDevice",
    "UnknownActivation",
    "UnsupportedModel",
    "UnusedOverride",
    "join",
    "page",
    "warn",
]


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
