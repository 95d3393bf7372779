"""A Hugging Face folder onto a mesh.

Everything that can be known without reading a weight is checked first: the config field by field,
every header against its file, every tensor against the model. Then each process reads the bytes
that its devices hold, and no others.
"""

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxtp.config.named_files import as_folder
from jaxtp.errors import BadWeights, Problems, join
from jaxtp.errors.arguments import FLAG, checked, one_of
from jaxtp.io.assemble import ParameterSource, assemble
from jaxtp.io.hf.adapters import adapter_sources, read_lora
from jaxtp.io.hf.config import family_of, read_fields
from jaxtp.io.hf.files import CONFIG, read_folder
from jaxtp.io.hf.quantized import alone, place_kernel
from jaxtp.io.json_text import read_json
from jaxtp.io.progress import byte_bar
from jaxtp.io.safetensors import StoredTensor
from jaxtp.layers.recomputation import REMAT
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import auto_context, plan_mesh
from jaxtp.models import Config, Decoder, abstract
from jaxtp.models.attention import cudnn_obstacle
from jaxtp.models.lora import is_adapter
from jaxtp.models.published import BUFFERS, HEAD, Storage, Stored, storages
from jaxtp.models.quantized import check_kind
from jaxtp.placement.arrays import plan_for
from jaxtp.placement.train_state import slots
from jaxtp.plan.decisions import A_PLAN, Plan
from jaxtp.plan.trees import FlatTree, flatten

FLOATS = ("float32", "bfloat16", "float16")
"""Types that weights may have; quantised checkpoints are not supported."""

TWO_MODELS = "download the checkpoint again; its config.json and its files are of two models"

NUM_THREADS = 8
"""Reads in flight; enough for NVMe and for network file systems."""


@checked(
    plan=A_PLAN.or_none(),
    remat=one_of(*REMAT),
    attention_implementation=one_of("auto", "xla", "cudnn"),
    quantize=one_of("none", "int8", "int4"),
    progress=FLAG,
)
def load_hf(
    folder: str | Path,
    mesh: Any,
    *,
    plan: Plan | None = None,
    adapter: str | Path | None = None,
    param_dtype: str | None = None,
    dtype: str | None = None,
    remat: str = "none",
    attention_implementation: Literal["auto", "xla", "cudnn"] = "xla",
    quantize: Literal["none", "int8", "int4"] = "none",
    progress: bool = True,
    **options: Any,
) -> tuple[Decoder, nnx.State]:
    """The model in a Hugging Face folder, its parameters placed on the mesh.

    Args:
        folder: Holds config.json and safetensors files, with their index if there are several. All
            processes must see it.
        mesh: A jax Mesh.
        plan: Where parameters go; by default `make_plan(models.abstract(config), mesh,
            config=config, **options)`, with the config of the model that is returned.
        adapter: A PEFT folder with a LoRA adapter of this model. Its factors lie beside the kernels
            that they adapt; `models.merge_lora` adds them to these.
        param_dtype: Type of the parameters; by default that of the file, as its config says.
        dtype: Type of activations and matrix products; by default that of the file.
        remat: As in the model's config.
        attention_implementation: As in the model's config; "auto" is cuDNN's on GPUs wherever type
            and heads allow it, else XLA's.
        quantize: For generation: kernels as integers of so many bits with a scale for each output,
            made as they are read, see `jaxtp.models.quantize`.
        progress: Show a progress bar on stderr, in the first process.
        **options: Options of `make_plan`.

    Returns:
        `(model, params)`: the `nnx.Module`, ready to be called, trained or saved, and its
        parameters as an `nnx.State` for code that wants arrays apart from structure
        (`nnx.merge(nnx.graphdef(model), params)`). Both hold the same arrays; donating one of them
        to a jitted function ends the other.

    Raises:
        UnsupportedModel: TP096, if the config asks for something that our models do not compute.
        BadWeights: TP095, if files are damaged, or hold other tensors than the config asks for.
        BadConfig: TP020, for another `remat`, `attention_implementation`, `quantize` or `progress`,
            or if qwix is not installed.
        PlanMismatch: TP045, for a `plan` that is none.
        BadUsage: TP132, for what names no folder.
        JaxtpError: whatever `make_plan` and `jaxtp.shard` raise.
    """
    folder = as_folder(folder)
    adapter = None if adapter is None else as_folder(adapter, "adapter")
    fields = read_json(folder / CONFIG)
    config = read_fields(fields, str(folder / CONFIG))
    if quantize != "none":
        check_kind(quantize)
    stored = read_folder(folder)
    file_dtype = _file_dtype(fields, stored, str(folder / CONFIG))
    config = dataclasses.replace(
        config,
        param_dtype=param_dtype or file_dtype,
        dtype=dtype or file_dtype,
        remat=remat,
        lora=None if adapter is None else read_lora(adapter),
        attention_implementation=attention_implementation
        if attention_implementation != "auto"
        else _kernel(config, dtype or file_dtype, mesh, plan, options),
    )
    model = abstract(config)
    names = family_of(fields, str(folder / CONFIG))[1].names
    sources = _match(model, names, stored, folder, any_float=param_dtype is not None)
    if adapter is not None:
        sources |= adapter_sources(model, names, adapter)
    if quantize != "none":
        config, stacked = dataclasses.replace(config, quantize=quantize), model
        model = abstract(config)
        sources = alone(sources, stacked, model)
    if plan is None:
        options = {"config": config, **options}
    plan = plan_for(model, mesh, plan, options)
    flat, target = FlatTree.of(model), plan_mesh(mesh, plan.mesh)
    places = slots(flat.shapes(), plan)
    total = sum(t.num_bytes for source in sources.values() for t in source.tensors.flat)
    with (
        auto_context(),
        ThreadPoolExecutor(NUM_THREADS) as pool,
        byte_bar(f"loading {folder.name}", total, progress) as advance,
    ):
        arrays: dict[str, Any] = {}
        for path, source in sources.items():
            array = assemble(source, places[path], target, config.param_dtype, pool, advance)
            arrays |= place_kernel(path, array, places, target, quantize)
    model = flat.like(arrays[path] for path in flat.values)
    return model, nnx.state(model, nnx.Param)


def _kernel(
    config: Config, dtype: str, mesh: Any, plan: Plan | None, options: Mapping[str, Any]
) -> Literal["xla", "cudnn"]:
    """What "auto" comes to on a mesh."""
    shape = MeshShape.of(mesh, options.get("axis_names")) if plan is None else plan.mesh
    on_gpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"
    return "cudnn" if on_gpu and not cudnn_obstacle(config, dtype, shape.tp_size) else "xla"


def _file_dtype(fields: Mapping[str, Any], stored: Mapping[str, StoredTensor], where: str) -> str:
    """The type that the config says its weights have; without a word there, that of the widest."""
    said = fields.get("torch_dtype", fields.get("dtype"))
    if said is None:
        found = {tensor.dtype for tensor in stored.values()}
        said = next((dtype for dtype in FLOATS if dtype in found), "float32")
    if said not in FLOATS:
        raise BadWeights(f"weights of type {said!r}", where=where, fix=f"supported: {join(FLOATS)}")
    return said


def _match(
    model: Decoder,
    names: Mapping[str, Stored],
    stored: Mapping[str, StoredTensor],
    folder: Path,
    *,
    any_float: bool,
) -> dict[str, ParameterSource]:
    """Which tensors each parameter is made of; every tensor is used, or known not to be needed."""
    problems = Problems()
    stored = _with_prefix(stored, next(iter(names.values())).name.partition(".")[0] + ".")
    sources: dict[str, ParameterSource] = {}
    wanted: set[str] = set()
    shapes = {path: param.shape for path, param in flatten(model).items()}
    hows = storages(names, {path: n for path, n in shapes.items() if not is_adapter(path)})
    _check_count(hows, stored, folder)
    for path, how in hows.items():
        sources[path] = ParameterSource(np.empty(how.stack, object), how)
        for index in np.ndindex(how.stack):
            name = names[path].name.format(*how.numbers(index))
            wanted.add(name)
            if name in stored:
                tensor = stored[name]
                _check(tensor, how, model.config.param_dtype, problems, any_float=any_float)
                sources[path].tensors[index] = _part(tensor, how)
        _check_alike(sources[path].tensors, problems)
    if missing := sorted(wanted - stored.keys()):
        what = f"{len(missing)} tensors are missing: {join(missing)}"
        problems.add(BadWeights(what, where=str(folder), fix=TWO_MODELS))
    extra = [n for n in stored.keys() - wanted - {HEAD} if not BUFFERS.search(n)]
    if extra:
        files = join(sorted({str(stored[name].file) for name in extra}))
        what = f"{len(extra)} tensors are not of this model: {join(sorted(extra))}"
        problems.add(BadWeights(what, where=files, fix=TWO_MODELS))
    problems.raise_any()
    return sources


def _check_count(
    hows: Mapping[str, Storage], stored: Mapping[str, StoredTensor], folder: Path
) -> None:
    """Refuses a config of far more layers or experts than the files hold, before they are listed.

    Raises:
        BadWeights: TP095, if the config asks for that many.
    """
    asked = sum(math.prod(how.stack) for how in hows.values())
    if asked > 2 * len(stored) + 10_000:
        raise BadWeights(
            f"the config asks for {asked:,} tensors, the files hold {len(stored):,}",
            where=str(folder),
            fix=TWO_MODELS,
        )


def _part(tensor: StoredTensor, how: Storage) -> StoredTensor:
    """The rows of a tensor that are one parameter: they lie together."""
    shape = (how.shape[0], *how.whole[1:])
    before = how.first * math.prod(shape[1:]) * jnp.dtype(tensor.dtype).itemsize
    return dataclasses.replace(tensor, shape=shape, start=tensor.start + before)


def _with_prefix(stored: Mapping[str, StoredTensor], prefix: str) -> Mapping[str, StoredTensor]:
    """Tensors by the names that a whole model gives them.

    Files saved from the model without its head lack the prefix; the published GPT-2 is such a file.
    """
    if any(name.startswith(prefix) for name in stored):
        return stored
    return {name if name == HEAD else prefix + name: tensor for name, tensor in stored.items()}


def _check(
    tensor: StoredTensor, how: Storage, param_dtype: str, problems: Problems, *, any_float: bool
) -> None:
    if tensor.shape != how.whole:
        problems.add(
            tensor.bad(
                f"has shape {list(tensor.shape)}, the config asks for {list(how.whole)}",
                TWO_MODELS,
            )
        )
    exact = tensor.dtype in FLOATS and jnp.promote_types(tensor.dtype, param_dtype) == param_dtype
    if not exact and not (any_float and tensor.dtype in FLOATS):
        problems.add(
            tensor.bad(
                f"is {tensor.dtype}, which {param_dtype} cannot hold",
                f"param_dtype={tensor.dtype!r}, or param_dtype={param_dtype!r} to round"
                if tensor.dtype in FLOATS
                else f"weights are of one of {join(FLOATS)}",
            )
        )


def _check_alike(tensors: NDArray[Any], problems: Problems) -> None:
    """The layers of one parameter are read into one buffer."""
    present = [tensor for tensor in tensors.flat if tensor is not None]
    for tensor in present:
        if tensor.dtype != present[0].dtype:
            problems.add(
                tensor.bad(
                    f"is {tensor.dtype}, {present[0].name!r} is {present[0].dtype}",
                    "save all layers in one type",
                )
            )
