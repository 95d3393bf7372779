"""A model into a Hugging Face folder."""

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxtp.config.named_files import as_folder
from jaxtp.errors import BadCheckpoint, BadConfig, PlanMismatch, join
from jaxtp.io.hf.config import read_fields, runtime_of, write_fields
from jaxtp.io.hf.files import CONFIG, Tensors, num_bytes, split_files, write_index
from jaxtp.io.json_text import read_json
from jaxtp.io.progress import byte_bar
from jaxtp.io.safetensors import write_file, write_order
from jaxtp.mesh.build import auto_context
from jaxtp.models import Config, abstract
from jaxtp.models.published import Storage, Stored, storages
from jaxtp.models.quantized import is_quantized
from jaxtp.models.registry import FAMILIES
from jaxtp.plan.decisions import Plan
from jaxtp.plan.specs import canonical
from jaxtp.plan.trees import PyTree, flatten, leaves, parameters

CARRIED = (
    *("generation_config.json", "tokenizer*", "vocab.*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
"""Files that belong to a model beside its weights."""


def save_hf(
    params: PyTree,
    folder: str | Path,
    *,
    config: Config | None = None,
    plan: Plan | None = None,
    like: str | Path | None = None,
    file_bytes: int = 5 * 10**9,
    progress: bool = True,
) -> None:
    """Writes a model as a folder that `transformers` loads.

    Tensors are fetched one at a time; with several processes all of them take part and the first
    one writes. Padding that a plan added to the vocabulary is left out. The folder appears only
    when it is complete.

    Args:
        params: The `nnx.Module`, or its parameters as a tree with the same paths.
        folder: A folder that does not exist yet.
        config: The model's config; needed if `params` is no module.
        plan: The plan they were placed by; needed where layers lie in pipeline stages.
        like: A Hugging Face folder of the same model, e.g. the one it was loaded from: its
            tokenizer and generation settings are copied, and fields of its config.json that change
            no logits (token ids, longest context) are kept. Without it these are absent, and
            `transformers` takes its defaults.
        file_bytes: Bytes of tensors in one file, at most; the default is that of `transformers`.
        progress: Show a progress bar on stderr, in the first process.

    Raises:
        BadCheckpoint: TP090, if `folder` exists.
        BadConfig: TP020, if there is no config, or `like` is another model.
        PlanMismatch: TP045, if the parameters are not those of the config, or lie in pipeline
            stages and there is no plan to say which layer is which.
        UnsupportedModel: TP096, if no Hugging Face family computes this config.
    """
    folder = as_folder(folder)
    if folder.exists():
        raise BadCheckpoint("the folder exists", where=str(folder), fix="choose a new folder")
    tree = parameters(params)
    config = config or getattr(tree, "config", None)
    if config is None:
        raise BadConfig(
            "parameters alone do not say what model they are of",
            where="config",
            fix="save_hf(model, ...), or save_hf(params, ..., config=model.config)",
        )
    if config.lora is not None:
        raise BadConfig(
            "the model has low-rank adapters beside its kernels",
            where="config.lora",
            fix="save_adapter(model, ...) writes them alone; models.merge_lora(model) first",
        )
    if is_quantized(config):
        raise BadConfig(
            f"the model's kernels are {config.quantize}",
            where="config.quantize",
            fix="save the float model that it was made of",
        )
    fields = _fields(config, like)
    names = FAMILIES[fields["model_type"]].names
    fetches, tensors = _tensors(config, names, dict(leaves(tree)), plan)
    files = split_files(tensors, file_bytes)
    total = sum(num_bytes(*tensor) for tensor in tensors.values())
    with (
        auto_context(),
        byte_bar(f"saving {folder.name}", total, progress) as advance,
        complete(folder) as unfinished,
    ):
        for file, names in files.items():
            chosen = {name: tensors[name] for name in names}
            arrays = _fetched(fetches, chosen, advance)
            if unfinished is None:
                for _ in arrays:
                    pass  # the first process needs this one's part
            else:
                write_file(unfinished / file, chosen, arrays)
        if unfinished is not None:
            write_index(unfinished, files, total)
            (unfinished / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
            _carry(like, unfinished)
    multihost_utils.sync_global_devices(f"save_hf {folder}")


@contextlib.contextmanager
def complete(folder: Path) -> Generator[Path | None]:
    """A folder beside `folder` that takes its place when it is complete; one process has it."""
    if jax.process_index() != 0:
        yield None
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fields(config: Config, like: str | Path | None) -> dict[str, Any]:
    """What goes into config.json."""
    if like is None:
        return write_fields(config)
    where = Path(like) / CONFIG
    theirs = read_json(where)
    ours = write_fields(config, theirs.get("model_type", ""))
    if read_fields(theirs, str(where)) != dataclasses.replace(config, **runtime_of(type(config))):
        raise BadConfig("another model", where=str(where), fix="like= a folder of this model")
    theirs.pop("dtype", None)  # the newer spelling of torch_dtype
    return theirs | {k: v for k, v in ours.items() if k not in theirs or k != "pad_token_id"}


def _carry(like: str | Path | None, folder: Path) -> None:
    for pattern in CARRIED if like is not None else ():
        for file in Path(like or "").glob(pattern):
            shutil.copy(file, folder)


def _tensors(
    config: Config, names: Mapping[str, Stored], tree: Mapping[str, Any], plan: Plan | None
) -> tuple[dict[str, Callable[[], NDArray[Any]]], Tensors]:
    """By name in the file: how to get a tensor, and its type and shape."""
    params = flatten(abstract(config))
    if differ := sorted(params.keys() ^ tree.keys()):
        raise PlanMismatch(
            f"paths that only the config or only the parameters have: {join(differ)}",
            where=differ[0],
            fix="pass the parameters of the model that config describes",
        )
    parts: dict[str, dict[tuple[int, int, int], Callable[[], NDArray[Any]]]] = {}
    tensors: Tensors = {}
    hows = storages(names, {path: param.shape for path, param in params.items()})
    for path, how in hows.items():
        places = places_of(path, tree[path], how.stack, plan)
        for index in np.ndindex(how.stack):
            name = names[path].name.format(*how.numbers(index))
            place = tuple(int(at[i]) for at, i in zip(places, index, strict=True))
            one = functools.partial(fetch, tree[path], place, params[path].shape, how)
            parts.setdefault(name, {})[how.first, *how.turn] = one
            tensors[name] = str(tree[path].dtype), how.whole
    return {name: functools.partial(_joined, fetches) for name, fetches in parts.items()}, tensors


def _joined(fetches: Mapping[tuple[int, int, int], Callable[[], NDArray[Any]]]) -> NDArray[Any]:
    """One tensor from its parts, by their first rows and their turns."""
    arrays = [one() for _, one in sorted(fetches.items())]
    if len(arrays) == 1:
        return arrays[0]
    *_, in_turns = next(iter(fetches))
    if in_turns == 1:
        return np.concatenate(arrays)
    return np.stack(arrays, -1).reshape(*arrays[0].shape[:-1], -1)


def places_of(
    path: str, leaf: Any, stack: tuple[int, ...], plan: Plan | None
) -> list[NDArray[np.int64]]:
    """Where each entry of every stacked dim is stored."""
    places = [np.arange(size) for size in stack]
    if plan is not None and isinstance(leaf, jax.Array):
        for blocks in plan[path].padding:
            if blocks.dim < len(stack):
                places[blocks.dim] = blocks.places
        return places
    sharding = getattr(leaf, "sharding", None)
    cut = stack and isinstance(sharding, NamedSharding) and canonical(sharding.spec, leaf.ndim)[0]
    if cut or np.shape(leaf)[: len(stack)] != stack:
        raise PlanMismatch(
            f"the array of shape {np.shape(leaf)} is stored by pipeline stage, and only its plan "
            f"says which of {stack[0]} layers is which",
            where=path,
            fix="save_hf(..., plan=plan), with the plan that it was placed by",
        )
    return places


def _fetched(
    fetches: Mapping[str, Callable[[], NDArray[Any]]],
    tensors: Tensors,
    advance: Callable[[int], None],
) -> Iterator[NDArray[Any]]:
    """The tensors of one file, one after the other."""
    for name in write_order(tensors):
        yield fetches[name]()
        advance(num_bytes(*tensors[name]))


def fetch(leaf: Any, index: tuple[int, ...], shape: tuple[int, ...], how: Storage) -> NDArray[Any]:
    """One stored tensor of a parameter, replicated in this process."""
    core = shape[len(index) :]
    if not isinstance(leaf, jax.Array):
        leaf, index = np.asarray(leaf)[index], ()
    whole = None
    if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
        whole = NamedSharding(sharding.mesh, PartitionSpec())
    return np.asarray(_taker(core, how, whole)(leaf, index).addressable_data(0))


@functools.cache
def _taker(
    shape: tuple[int, ...], how: Storage, sharding: NamedSharding | None
) -> Callable[[Any, tuple[int, ...]], jax.Array]:
    """A compiled function that turns one layer of a parameter into a tensor as stored."""

    def take(leaf: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        for i in index:
            leaf = jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)
        leaf = leaf[tuple(slice(n) for n in shape)]  # without padding
        return leaf.transpose(np.argsort(how.order)).reshape(how.shape)

    return jax.jit(take, out_shardings=sharding)
