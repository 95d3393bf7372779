"""The two programs of generation: prompts into a cache, and tokens out of it.

Shape suffixes: B batch, P slots of the padded prompts, N new tokens at most.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtp.activations.by_name import constrain, use_plan
from jaxtp.compile.options import Value, probe
from jaxtp.generation.sampling import Numbers, Sampling, choose
from jaxtp.models.cache import Cache
from jaxtp.models.decoder import Decoder
from jaxtp.plan.decisions import Plan
from jaxtp.plan.trees import PyTree

READ_ONCE: Mapping[str, Value] = {
    # XLA makes one product of several by the same input, q with k with v: for each token it would
    # read their weights, write them one after the other, and read that.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # It pads sizes to a multiple of 8, of queries for a kv head too: twice the scores of 4 in fp32,
    # which are a tenth of what a step of many rows moves. cuBLAS takes any number of columns.
    "xla_disable_hlo_passes": "cublas-pad-for-gemms",
}
"""Compile options of the loop over tokens, whose time is that of reading weights and cache."""

IN_THE_PRODUCT: Mapping[str, Value] = {
    # A product that turns integers into floats as it reads them is a Triton kernel; cuBLAS, for
    # which they would be written as floats, has no such thing. Left for others where nothing is
    # turned: it reads slices of the cache in place.
    "xla_gpu_enable_triton_gemm": True,
    "xla_gpu_triton_gemm_any": False,
    # Otherwise int4 is transposed first, the whole kernel.
    "xla_gpu_experimental_pack_dot_operands_along_k_dimension": False,
}
"""The same for integer kernels."""


def loop_options(*, quantized: bool) -> Mapping[str, Value]:
    """Compile options of the loop over tokens, as to be probed."""
    return {**READ_ONCE, **IN_THE_PRODUCT} if quantized else READ_ONCE


class Progress(NamedTuple):
    """What a batch has come to; it stays on the devices, and every program takes its place.

    Attributes:
        cache: Keys and values.
        tokens: New tokens, (batch, N), 0 where there is none yet.
        nats: Negative log-probability of each, (batch, N) float32.
        num_new: New tokens of each row, (batch,).
        done: Rows that have ended, (batch,).
        step: New tokens of the rows that have not, a scalar.
        first: Slot of each row's first token, (batch,).
        keys: A random key for each row, (batch,).
    """

    cache: Cache
    tokens: jax.Array
    nats: jax.Array
    num_new: jax.Array
    done: jax.Array
    step: jax.Array
    first: jax.Array
    keys: jax.Array


@dataclasses.dataclass(frozen=True)
class Setting:
    """What both programs are compiled for.

    Attributes:
        graph: The model's structure.
        plan: Where its parameters lie; None on one device.
        mesh: The plan's mesh; None with it.
        sampling: The kind of how tokens are chosen; `Numbers` are arguments of the programs.
        end_tokens: Ids that end a row.
        prompt_slots: Slots of the padded prompts.
        new_slots: Slots behind them.
        quantized: Whether the model's kernels are integers.
    """

    graph: nnx.GraphDef[Decoder]
    plan: Plan | None
    mesh: Mesh | None
    sampling: Sampling
    end_tokens: tuple[int, ...]
    prompt_slots: int
    new_slots: int
    quantized: bool = False

    @contextlib.contextmanager
    def plan_in_force(self) -> Generator[None]:
        """Inside the block activations lie as the plan wants them."""
        if self.plan is None or self.mesh is None:
            yield
            return
        with use_plan(self.plan, self.mesh):
            yield

    def copies(self, batch: int) -> int:
        """How often a token is to be computed: twice where a device has a single row.

        Of one row XLA makes no matrix product: it multiplies all of a weight by it, writes that,
        and adds it up. And a lookup of one row in a sharded token table gathers the table.
        """
        rows = batch if self.plan is None else batch // self.plan.mesh.batch_ways
        return 2 if rows == 1 else 1


@functools.cache
def prompt_program(setting: Setting) -> Callable[..., Progress]:
    """`(parameters, tokens (batch, P), first, done, keys (batch,), Numbers) -> Progress`.

    Prompts end together, in slot P - 1; the first new token is among what comes out.
    """

    def run(
        params: PyTree,
        tokens_BP: jax.Array,
        first_B: jax.Array,
        done_B: jax.Array,
        keys: jax.Array,
        numbers: Numbers,
    ) -> Progress:
        with setting.plan_in_force():
            model = nnx.merge(setting.graph, params)
            batch = tokens_BP.shape[0]
            empty = model.init_cache(batch, setting.prompt_slots + setting.new_slots)
            empty = jax.tree.map(lambda x: constrain(x, "caches"), empty)
            h_BPD, cache = model.extend(tokens_BP, empty, jnp.int32(0), first_B)
            new_BN = constrain(jnp.zeros((batch, setting.new_slots), jnp.int32), "tokens")
            progress = Progress(
                cache=cache,
                tokens=new_BN,
                nats=new_BN.astype(jnp.float32),
                num_new=jnp.zeros_like(first_B),
                done=done_B,
                step=jnp.int32(0),
                first=first_B,
                keys=keys,
            )
            return _taken(setting, model, h_BPD[:, -1:], progress, numbers)

    return jax.jit(run)


@functools.cache
def token_program(setting: Setting, places: Progress) -> Callable[..., Progress]:
    """`(parameters, Progress, limit, Numbers) -> Progress`: until rows have `limit` or have ended.

    The state is donated and comes back in the same place, so that one call may follow the other.

    Args:
        setting: See there.
        places: Where the leaves of the state lie, shardings in tuples.
    """

    def run(params: PyTree, progress: Progress, limit: jax.Array, numbers: Numbers) -> Progress:
        def goes_on(progress: Progress) -> jax.Array:
            return (progress.step < limit) & ~jnp.all(progress.done)

        def step(progress: Progress) -> Progress:
            model = nnx.merge(setting.graph, params)
            last_B1 = jax.lax.dynamic_slice_in_dim(progress.tokens, progress.step - 1, 1, axis=1)
            slot = setting.prompt_slots + progress.step - 1
            copies = setting.copies(last_B1.shape[0])
            rows = (jnp.repeat(x, copies, axis=0) for x in (last_B1, progress.first))
            last_B1, first_B = jax.lax.optimization_barrier(tuple(rows))  # or XLA undoes it
            h_B1D, cache = model.extend(last_B1, progress.cache, slot, first_B)
            progress = progress._replace(cache=cache)
            return _taken(setting, model, h_B1D[::copies], progress, numbers)

        with setting.plan_in_force():
            return jax.lax.while_loop(goes_on, step, progress)

    options = dict(probe(loop_options(quantized=setting.quantized)).options)
    return jax.jit(run, donate_argnums=1, out_shardings=places, compiler_options=options)


def _taken(
    setting: Setting, model: Decoder, h_B1D: jax.Array, progress: Progress, numbers: Numbers
) -> Progress:
    """One more token of every row that has not ended."""
    logits_BV = model.logits(h_B1D)[:, 0]
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    keys_B = fold(progress.keys, progress.step)
    token_B, logp_B = choose(logits_BV, setting.sampling, keys_B, numbers)
    goes_B = ~progress.done

    def written(all_BN: jax.Array, new_B: jax.Array) -> jax.Array:
        new_B1 = jnp.where(goes_B, new_B, 0).astype(all_BN.dtype)[:, None]
        placed = jax.lax.dynamic_update_slice_in_dim(all_BN, new_B1, progress.step, axis=1)
        return constrain(placed, "tokens")

    ends_B = jnp.any(token_B[:, None] == jnp.array((*setting.end_tokens, -1))[None], axis=-1)
    return progress._replace(
        tokens=written(progress.tokens, token_B),
        nats=written(progress.nats, -logp_B),
        num_new=progress.num_new + goes_B,
        done=progress.done | ends_B,
        step=progress.step + 1,
    )
