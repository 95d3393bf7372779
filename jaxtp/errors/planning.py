"""What can be wrong with a mesh, with settings, with a tree or with a plan: TP001 to TP069."""

from jaxtp.errors.base import JaxtpError


class ConflictingDecisions(JaxtpError, ValueError):
    """Two sources of equal strength want different things for one parameter.

    Why it matters: choosing silently would give right numbers and a slow program.
    Example: a layer-norm scale that one rule calls "norm" and an override splits, or two overrides
    that match one path with different specs.
    Fix: keep one of the two, or add an override, which outranks every other source.
    """

    code = "TP001"


class CommunicationTimeout(JaxtpError, TimeoutError):
    """A process did not come, died, or did not take part in a step or a barrier in time.

    Why it matters: JAX itself waits for ever, at full GPU load and without a log line, or ends the
    others with a stack trace that does not say who it was.
    What is said: the step, the mesh, and of each process its host, when it was last heard of, what
    it had done and where it was then. The program ends with exit code 75, from a thread if its main
    thread waits for the devices, so that a scheduler starts it again.
    Fix: read the log of the process that the message names; set NCCL_DEBUG=WARN and
    NCCL_DEBUG_SUBSYS=INIT,NET,COLL on every process; start all of them again, because the device
    queues of those that waited stay blocked. `faults.step_timeout` and `faults.heartbeat_timeout`
    say how long to wait.
    """

    code = "TP002"
    exit_code = 75


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
    """The mesh uses fewer devices than there are, or has an axis that shards nothing.

    Why it matters: `jax.make_mesh((2, 2), ...)` on eight devices quietly leaves four of them idle;
    along an axis that shards neither the batch nor a parameter devices do the same work twice, and
    along cp where a function has no sequences that they could share.
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


class ProcessesDisagree(JaxtpError, ValueError):
    """The processes of one run differ in settings, flags or versions.

    Why it matters: they would compile different programs, and wait for each other in the first
    collective that only some of them have, for ever.
    Example: an edited config on one host; `JAX_ENABLE_X64` set in one shell; another jaxlib.
    Fix: the message gives each setting that differs, with its values and the processes of each.
    """

    code = "TP014"


class BadProcesses(JaxtpError, ValueError):
    """The processes were started in a way that cannot work, or that leaves GPUs idle.

    Why it matters: one process per GPU is the rule; with one per node JAX uses the first GPU of
    each node and says nothing.
    Example: 8 GPUs and `--ntasks-per-node=1`; two processes of the same number; Slurm without
    `srun`.
    Fix: `srun --ntasks-per-node=8 --gpus-per-node=8`, or give `local_device_ids` on purpose.
    """

    code = "TP015"


class UnhealthyDevice(JaxtpError, RuntimeError):
    """A device computes wrongly, or does not answer.

    Why it matters: one such device spoils the gradients of all others, or stalls them.
    Fix: take the host that the message names out of the job (`--exclude`), and have it repaired.
    """

    code = "TP016"


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
    """Replicated matrices take more bytes than the budget allows.

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
