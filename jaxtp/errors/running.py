"""What can go wrong when a plan is applied, compiled, saved or trained: TP070 and up."""

from jaxtp.errors.base import JaxtpError


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
    """`overlap="aggressive"` was asked for, and the layers cannot run as it wants them to.

    It runs them in two halves of the batch, to hide all-reduces over tp, and with each layer's
    weights gathered one layer ahead, to hide what the batch axes move.
    Why it matters: they run one after the other instead, with the same numbers, and the all-reduces
    or gathers of the forward pass stay exposed. Models and `jaxtp.parallelize` warn with
    this text.
    Example: one sequence per replica; pipeline stages, which gather once a step; 12 heads on tp=8;
    experts; random numbers drawn in loops inside a layer, or in stages; a batch that does not
    divide over the replicas. In `jaxtp.parallelize`: sequence parallelism, equations that mix rows
    of the batch in front of products, weights sharded over fsdp that no scan slices and no row of
    layers alike has, all products inside a custom derivative rule.
    Fix: an even number of sequences per replica, heads and widths that divide over all of tp, and
    `remat="block_outputs"`.
    """

    code = "TP073"


class BadStages(JaxtpError, ValueError):
    """Layers or micro-batches that pipeline stages cannot share.

    Why it matters: with fewer micro-batches than stages some stage never works while another does,
    and schedules in rounds would wait for a micro-batch that does not come, a deadlock elsewhere.
    Fix: at least as many micro-batches as stages, a multiple of them for several rounds, and a
    layer for every stage in every round.
    """

    code = "TP074"


class BadCheckpoint(JaxtpError, ValueError):
    """A checkpoint is missing, half-written or damaged, or could not be written.

    Nor can one be made of a state without arrays, of shapes without numbers, of a step that is no
    count, or with an `extra` that JSON would change.
    Why it matters: a run that started anew in silence would lose what it had learned. A damaged
    checkpoint is skipped with a warning as long as there is an older one that can be read.
    Fix: the message names the folder and what is wrong with it; where none can be read, choose
    another folder or repair the disk. Save the arrays themselves, and an `extra` of numbers, text,
    lists and dicts with text as keys.
    """

    code = "TP090"


class CheckpointMismatch(JaxtpError, ValueError):
    """A checkpoint holds another model or another optimizer than the one it is restored into.

    Example: other layers, widths or dtypes; Adam's two moments for Lion's one.
    Fix: the message lists what differs; restore with the model and optimizer that were saved.
    """

    code = "TP091"


class RunFolderTaken(JaxtpError, RuntimeError):
    """A run folder belongs to another run that still lives.

    Why it matters: two runs in one folder set each other's checkpoints aside and mix their metrics.
    Example: a job that was queued again while its predecessor is still saving.
    Fix: the message names the process, its host and how to take the folder over. A dead owner is
    outlived: at once on its own machine, elsewhere after a minute without a heartbeat. The exit
    code is 75, since the same command may work a little later.
    """

    code = "TP092"
    exit_code = 75


class BadRunFolder(JaxtpError, OSError):
    """A run folder cannot be written to, or not any more.

    Example: a read-only or full disk; a folder that was moved, deleted, or taken over by another
    run while this one was frozen.
    Fix: the message says what the file system answered and what helps. The run is not started again
    by itself: it would end in the same way.
    """

    code = "TP093"


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

    Fix: `pip install "jaxtp[preflight]" jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION`,
    with the version of jax.
    """

    code = "TP113"


class DoesNotFit(JaxtpError, MemoryError):
    """The compiled step needs more memory than a GPU has.

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
    """The loss, a gradient or a parameter is not a finite number, or the loss has jumped.

    Why it matters: the run stops before it saves, so the last good checkpoint is untouched.
    Fix: lower the learning rate, turn on gradient clipping.
    """

    code = "TP131"


class BadUsage(JaxtpError, ValueError):
    """A command line or an input file of a command cannot be read.

    Fix: the message names the argument and what it takes.
    """

    code = "TP132"


class BadStep(JaxtpError, TypeError):
    """A train step does not return the state that it was given: other arrays, shapes or types.

    Or it cannot be called with what it is given, its metrics are no numbers, or an array was given
    to an earlier step, which took over its memory.
    Why it matters: the new state could not take the old one's place, and every step would compile
    again.
    Fix: return `(state, metrics)` or `state`; cast updated parameters back to their own type. Go on
    with the state that the step returned, or make the step with `donate=False`.
    """

    code = "TP133"


class BadPrompt(JaxtpError, ValueError):
    """A prompt that a model cannot answer, or a folder that lacks what answering takes.

    Why it matters: a lookup past a vocabulary or a position table gives numbers, and text that
    means nothing.
    Example: no tokens; more tokens than the model has positions; a tokenizer of another model; a
    chat without a template.
    Fix: the message names the prompt, the numbers and what would fit.
    """

    code = "TP140"
