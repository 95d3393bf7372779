"""`make_plan`: the story, nothing else.

Each step is one call into one module.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxtp.errors import BadConfig, join
from jaxtp.errors.arguments import FLAG, MAPPING, TEXT, checked, number, one_of
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import faults_of
from jaxtp.plan import trees
from jaxtp.plan.decisions import Plan
from jaxtp.plan.stages import Stages
from jaxtp.rules import (
    annotations,
    dataflow,
    experts,
    factoring,
    fallback,
    fsdp,
    fused,
    grouped_kernels,
    names,
    pipeline,
    resolve,
    review,
)
from jaxtp.rules import inputs as placed_inputs
from jaxtp.rules.model_dims import ModelDims


@checked(
    overrides=MAPPING.or_none(),
    policy=TEXT,
    pad_vocab=one_of(False, True, "masked"),
    strict=FLAG,
    replicated_budget=number(0, 1),
)
def make_plan(
    params: trees.PyTree,
    mesh: Any,
    *,
    config: Any = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    axis_names: Mapping[str, str] | None = None,
    policy: str = "factor",
    zero: int | None = None,
    stages: Stages | None = None,
    pad_vocab: bool | Literal["masked"] = False,
    strict: bool = False,
    replicated_budget: float = 0.1,
    fn: Any = None,
    inputs: Sequence[Any] | None = None,
) -> Plan:
    """Decides where every parameter goes. Needs shapes and a mesh shape only; touches no device.

    Args:
        params: A Linen `params` dict (boxed or not), an `nnx.Module` or `nnx.State`, a
            `TrainState`, or any tree of arrays or `jax.ShapeDtypeStruct`.
        mesh: A jax Mesh or AbstractMesh, or axis sizes such as `{"dp": 2, "tp": 8}`.
        config: The model's config object or dict; Hugging Face's attribute names are read.
        heads: Query heads of one layer, where flat kernels hide them.
        kv_heads: Key/value heads of one layer.
        head_dim: Width of one head, in elements.
        overrides: Regular expression searched in the path -> PartitionSpec. Outranks everything.
        axis_names: What jaxtp calls an axis -> what the mesh calls it, e.g. `{"tp": "model"}`.
        policy: For units that do not divide: "factor" takes the widest part of the tensor axis
            that divides, "replicate" keeps them replicated, "error" refuses.
        zero: What is sharded over the fsdp axis, and over cp and ep with it: 0 the batch alone, 1
            also optimizer state, 2 also gradients, 3 also parameters. By default 3 where the mesh
            has an fsdp axis, else 0.
        stages: How stacked layers are assigned along a pp axis; by default evenly, in one round,
            for as many micro-batches as stages.
        pad_vocab: Pad a vocabulary that does not divide, instead of replicating its table. The
            logits are then longer than the vocabulary, and the model must mask them with
            `jaxtp.mask_padding`: jaxtp's own models do (give `config=`), another one is seen to do
            it when it is traced (`fn=`, `inputs=`). "masked" says that it does without showing it.
        strict: Refuse a plan that wastes devices or memory, instead of noting it.
        replicated_budget: Under `strict`, the share of all bytes that whole matrices may take.
        fn: The forward function `fn(params, *inputs)` or a Linen module, traced for its dataflow;
            not needed for an `nnx.Module` that is called on the inputs.
        inputs: Example inputs, arrays or `jax.ShapeDtypeStruct`, caches and states of a decode step
            among them: `plan.inputs` says where each goes, and why.

    Returns:
        A plan with one decision, and at least one reason, per leaf.

    Raises:
        NoTensorAxis: TP013, if the mesh has no tensor axis.
        ConflictingDecisions, UnusedOverride, BadSpec: TP001, TP040, TP044, on overrides.
        SizeMismatch: TP003, if given sizes fit no kernel, a given spec does not divide, or an ep
            axis does not divide the experts.
        BadConfig: TP020, for an unknown policy or ZeRO stage, or a vocabulary that would be padded
            for a model that does not mask its logits.
        BadStages: TP074, on a pp axis, if there are no stacked layers or `stages` does not fit.
        HeadsNotDivisible: TP041, under the policy "error".
        NothingSharded, ReplicatedTooMuch, IdleDevices: TP042, TP043, TP011, under `strict`.
    """
    shape = MeshShape.of(mesh, axis_names)
    faults = faults_of(mesh, shape)
    tree = trees.parameters(params)
    leaves = trees.flatten(tree)
    dims = ModelDims.of(config, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    traced = dataflow.trace(fn, tree, inputs)
    written = annotations.read(leaves, shape, overrides or {})
    votes = (*names.votes(leaves, dims), *traced.votes, *written.votes)
    claims = resolve.decide(leaves, votes)
    local = experts.local_share(claims, shape)
    shape, shares = factoring.factor(local, shape, policy)
    decisions = fallback.fit(local, shares, shape, policy, pad_vocab=bool(pad_vocab))
    fallback.check_masked(decisions, pad_vocab, config, traced.masked, traced.unmasked)
    decisions = fused.place(claims, shares, decisions, shape)
    decisions = experts.assign(claims, decisions, shape)
    stages, decisions = pipeline.assign_layers(claims, decisions, shape, stages)
    zero, decisions = fsdp.spread(claims, decisions, shape, zero)
    found = review.review(claims, decisions, shape, faults, strict=strict, budget=replicated_budget)
    plan = Plan(
        mesh=shape,
        decisions=decisions,
        policy=policy,
        zero=zero,
        stages=stages,
        notes=(*written.notes, *found, *grouped_kernels.notes(traced.analysis, shape)),
    )
    if traced.analysis is None:
        return plan
    placed = placed_inputs.input_decisions(traced.analysis, plan, fn, inputs or ())
    return dataclasses.replace(plan, inputs=placed)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses what is no option of `make_plan`, for functions that hand theirs on.

    Raises:
        BadConfig: TP020, with the option that was perhaps meant.
    """
    parameters = inspect.signature(make_plan).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise BadConfig(
                f"{name} is no option of make_plan",
                where=name,
                fix=f"did you mean {near[0]}?" if near else f"one of {join(known, 20)}",
            )
