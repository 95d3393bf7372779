"""Do all processes hold the same? Copies of one array, batches and plans, compared before a step.

A program over several processes is right only if each gives what the others believe it gives: the
same global batch, the same numbers in arrays of which several hold a copy, the same plan. Nothing
in JAX looks. Here every process says a digest of its own, and what differs is TP014.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxtp.errors import ProcessesDisagree, join
from jaxtp.processes.startup import ARRAY, agree, gather

SAMPLE = 4096
"""Elements of an array that its digest is made of, evenly spread: a seed, a shuffle or a step that
differ change nearly all of them, and hashing all of a state would take as long as loading it."""


def check_agreement(
    facts: Mapping[str, str], given: Mapping[str, Any], placed: Iterable[jax.Array] = ()
) -> None:
    """Refuses processes that differ in what they must have in common; alone it does nothing.

    Every process calls it at the same point.

    Args:
        facts: Name -> text, e.g. a plan.
        given: Arrays by path that every process gives in full: a batch, parameters.
        placed: Arrays on a mesh of all processes, whose copies are compared.

    Raises:
        ProcessesDisagree: TP014, with what differs and where.
        CommunicationTimeout: TP002, naming processes that did not come.
    """
    if jax.process_count() == 1:
        return
    mine = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in facts.items()}
    mine |= {f"{ARRAY}{path or 'the array'}": text for path, text in _host_digests(given)}
    agree(mine)
    _compare_copies(list(placed))


def _host_digests(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for path, leaf in values.items():
        if isinstance(leaf, jax.Array) and (not leaf.is_fully_addressable or leaf.is_deleted()):
            continue  # copies of a global array are compared as such; a deleted one has no values
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            yield path, digest(leaf)


def digest(leaf: Any) -> str:
    """A short text that tells arrays apart: shape, type, and a sample of the elements."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    host = np.asarray(leaf)
    flat = host.reshape(-1)
    sample = np.ascontiguousarray(flat[:: max(1, flat.size // SAMPLE)])
    text = hashlib.sha256(sample.tobytes())
    text.update(f"{host.shape} {host.dtype}".encode())
    return text.hexdigest()[:16]


def _compare_copies(arrays: list[jax.Array]) -> None:
    """Pieces that several processes hold must be equal in all of them."""
    mine: dict[str, str] = {}
    for number, x in enumerate(arrays):
        if x.is_fully_addressable or not isinstance(x.sharding, NamedSharding):
            continue
        owners: dict[str, set[int]] = {}
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            owners.setdefault(str(index), set()).add(device.process_index)
        for shard in x.addressable_shards:
            if len(owners[str(shard.index)]) > 1:
                mine[f"{number} {shard.index}"] = digest(shard.data)
    said = gather("copies of the state", mine)
    keys = dict.fromkeys(itertools.chain.from_iterable(said.values()))
    differ = [key for key in keys if len({d[key] for d in said.values() if key in d}) > 1]
    if differ:
        number, index = differ[0].split(" ", 1)
        camps = {process: d[differ[0]] for process, d in said.items() if differ[0] in d}
        raise ProcessesDisagree(
            f"{len(differ)} pieces of the state differ between processes that each hold a copy; "
            f"the first is array {number} of shape {arrays[int(number)].shape}, piece {index}: "
            + join(f"process {process} has {text}" for process, text in camps.items()),
            where="state",
            fix="the same seed and the same checkpoint in every process",
        )
