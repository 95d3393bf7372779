"""`generate`: prompts of any lengths, several samples each, on whatever mesh the model lies on."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxtp.errors import BadPrompt, BadStages, PlanMismatch, Problems, join, warn
from jaxtp.errors.arguments import FUNCTION, TEXT, Kind, checked, instance, is_whole, several, whole
from jaxtp.generation.programs import Progress, Setting, prompt_program, token_program
from jaxtp.generation.sampling import Sampling
from jaxtp.hardware.links import GIB
from jaxtp.mesh.build import auto_context
from jaxtp.models.decoder import Decoder
from jaxtp.models.quantized import is_quantized
from jaxtp.plan.decisions import A_PLAN, Plan
from jaxtp.plan.specs import canonical
from jaxtp.plan.trees import leaves
from jaxtp.rules.planner import make_plan

CHUNK = 8
"""Tokens between two looks at the text: of a stream, and for stop strings."""

FEWEST_SLOTS = 16
"""Prompts and answers have slots for this many tokens, or twice, four times, ... as many: few
lengths, so that most calls find their programs compiled."""


class TextCodec(Protocol):
    """What turns text into token ids and back; the tokenizers of transformers do."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of some tokens."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What follows one prompt.

    Attributes:
        prompt: Which prompt.
        sample: Which of its samples.
        tokens: New token ids, the one that ended it included.
        log_probabilities: Of each of them under the model, in nats.
        text: Their text, up to a stop string; "" without a tokenizer.
        ended: By an end token, a stop string, or because there was no room for more.
    """

    prompt: int
    sample: int
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    text: str
    ended: Literal["end", "stop", "length"]


COUNT = Kind(is_whole, "an integer, 1 or more", BadPrompt)


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return value.ndim == 0
    return dtype == np.uint32 and value.ndim == 1


@checked(
    model=instance(Decoder, takes="a model from jaxtp.load_hf or jaxtp.models.build"),
    prompts=Kind(
        lambda value: isinstance(value, str | list | tuple) or getattr(value, "ndim", 0) > 0,
        "text, a list of texts, or a list of lists of token ids",
        BadPrompt,
    ),
    max_new_tokens=COUNT,
    stop=several(TEXT, 'a list of texts: ["\\n"]'),
    end_tokens=several(whole(0), "a list of token ids"),
    samples=COUNT,
    key=Kind(_is_key, "a key: jax.random.key(0)").or_none(),
    tokenizer=Kind(
        lambda value: hasattr(value, "encode") and hasattr(value, "decode"),
        "an object with encode(text) and decode(tokens)",
    ).or_none(),
    plan=A_PLAN.or_none(),
    max_context=whole(1).or_none(),
    on_text=FUNCTION.or_none(),
    on_tokens=FUNCTION.or_none(),
)
def generate(
    model: Decoder,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    end_tokens: Sequence[int] = (),
    samples: int = 1,
    key: jax.Array | None = None,
    tokenizer: TextCodec | None = None,
    plan: Plan | None = None,
    max_context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Answers to prompts, by a model of this package where it lies.

    Rows of all lengths make one batch, split over dp and fsdp. Tokens are drawn on the devices, in
    one loop that ends when all rows have; the same key gives the same tokens on every mesh, up to
    rounding of the logits, whatever else is in the batch. A call with lengths and settings like
    those of an earlier one compiles nothing.

    Args:
        model: From `jaxtp.load_hf`, `jaxtp.shard` or `jaxtp.models.build`.
        prompts: Text, which takes a tokenizer, or token ids.
        max_new_tokens: Most tokens of an answer.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is
            drawn.
        top_k: Draw from so many likeliest tokens; 0: from all.
        top_p: Draw from the fewest likeliest tokens that have this probability together.
        min_p: Draw from tokens at least this likely, as a share of the likeliest one's probability.
        stop: Texts that end an answer; they are not part of it.
        end_tokens: Ids that end an answer.
        samples: Answers for each prompt.
        key: PRNG key; default: `jax.random.key(0)`.
        tokenizer: Encodes and decodes text.
        plan: What the parameters were placed by; by default found again from where they lie.
        max_context: Most tokens of a prompt and its answer, where the model sets no limit itself.
        on_text: Called with (row, new text) as text comes, every few tokens; rows are those of the
            result.
        on_tokens: Called with how many tokens rows have come to: after the first, and then as often
            as `on_text`.

    Returns:
        One answer for each prompt and sample: all samples of the first prompt, then of the next.

    Raises:
        BadPrompt: TP140, for prompts that are empty, too long, or have tokens the model has not.
        BadConfig: TP020, if a setting of the sampling is out of its bounds.
        BadStages: TP074, if the model lies in pipeline stages.
        PlanMismatch: TP045, if the parameters do not lie as the plan says.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = _encoded([prompts] if isinstance(prompts, str) else prompts, tokenizer)
    max_new_tokens, samples = int(max_new_tokens), int(samples)
    check_prompts(
        rows, model.config, max_new_tokens=max_new_tokens, max_context=max_context, samples=samples
    )
    if stop and tokenizer is None:
        raise BadPrompt("stop strings without a tokenizer", where="stop", fix="end_tokens=, as ids")
    plan, mesh = plan_of(model, plan)
    graph, params = nnx.split(model)
    setting = Setting(
        graph=graph,
        plan=plan,
        mesh=mesh,
        sampling=sampling.kind,
        end_tokens=tuple(end_tokens),
        prompt_slots=_slots(max(map(len, rows))),
        new_slots=_slots(max_new_tokens),
        quantized=is_quantized(model.config),
    )
    batch = _batch(setting, rows, samples, jax.random.key(0) if key is None else key)
    texts = _Texts(tokenizer, tuple(stop), len(rows) * samples, on_text)
    with auto_context():
        progress = prompt_program(setting)(params, *batch, sampling.numbers)
        more = token_program(setting, jax.tree.map(lambda x: x.sharding, progress))
        texts.take(progress)
        if on_tokens is not None:
            on_tokens(texts.step)
        looks = stop or on_text is not None or on_tokens is not None
        chunk = CHUNK if looks else max_new_tokens
        while texts.step < max_new_tokens and not texts.all_done:
            limit = jnp.int32(min(texts.step + chunk, max_new_tokens))
            progress = more(params, texts.stopped(progress), limit, sampling.numbers)
            texts.take(progress)
            if on_tokens is not None:
                on_tokens(texts.step)
    return texts.answers(samples, setting.end_tokens)


def plan_of(model: Decoder, plan: Plan | None = None) -> tuple[Plan | None, Mesh | None]:
    """The plan and the mesh that a model's parameters lie by; None on one device.

    Raises:
        BadStages: TP074, if they lie in pipeline stages.
        PlanMismatch: TP045, if they do not lie as the plan says.
    """
    placed = dict(leaves(model))
    shardings = {path: getattr(leaf, "sharding", None) for path, leaf in placed.items()}
    first = next(iter(shardings.values()))
    mesh = first.mesh if isinstance(first, NamedSharding) else None
    if not isinstance(mesh, Mesh) or mesh.size == 1:
        return None, None
    if plan is None:
        plan = _found(model, mesh, shardings)
    if plan.stages is not None:
        raise BadStages(
            "the model lies in pipeline stages, and a token passes them one after the other",
            where="pp",
            fix="place it on a mesh of tp and dp: jaxtp.shard(model, mesh)",
        )
    if cut := [d for d in plan.decisions if d.dim_on(plan.mesh.batch) is not None]:
        gathered = sum(d.num_bytes for d in cut) / GIB
        warn(
            f"TP043: {join(plan.mesh.batch)} shard parameters too, and every token gathers "
            f"{gathered:,.2f} GiB of them\n  fix: jaxtp.shard(model, mesh, zero=0) for generation; "
            "plan.moved_bytes(other) says what that moves"
        )
    for path, sharding in shardings.items():
        want = plan[path].spec
        found = sharding and canonical(sharding.spec, placed[path].ndim)
        if found != want:
            raise PlanMismatch(
                f"lies at {found}, the plan says {want}",
                where=path,
                fix="generate(..., plan=plan), with the plan that the model was placed by",
            )
    return dataclasses.replace(plan, sequence_parallel=False, overlap="off"), mesh


def _found(model: Decoder, mesh: Mesh, shardings: Mapping[str, Any]) -> Plan:
    """The plan that `load_hf` and `shard` make by themselves, padded vocabulary or not."""
    whole = _unfactored(mesh)
    plain = make_plan(model, whole, config=model.config)
    padded = make_plan(model, whole, config=model.config, pad_vocab=True)
    lies = {path: canonical(s.spec, len(plain[path].shape)) for path, s in shardings.items()}
    return padded if all(padded[path].spec == spec for path, spec in lies.items()) else plain


def _unfactored(mesh: Mesh) -> Mesh:
    """The mesh with the factors of its tensor axis as one axis again."""
    factors = [name for name in mesh.axis_names if str(name).rpartition("_")[2].isdigit()]
    if not factors:
        return mesh
    names = [name for name in mesh.axis_names if name not in factors]
    sizes = [mesh.shape[name] for name in names]
    tp_name = str(factors[0]).rpartition("_")[0]
    return Mesh(mesh.devices.reshape(*sizes, -1), (*names, tp_name))


def _encoded(
    prompts: Sequence[str | Sequence[int]], tokenizer: TextCodec | None
) -> list[Sequence[int]]:
    rows: list[Sequence[int]] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer is None:
            raise BadPrompt(
                "text without a tokenizer",
                where=f"prompts[{i}]",
                fix="tokenizer=, an object with encode(text) and decode(tokens), or token ids",
            )
        if not isinstance(prompt, str) and not (
            np.ndim(ids := np.asarray(prompt)) == 1 and (not ids.size or ids.dtype.kind in "iu")
        ):
            raise BadPrompt(
                f"a {type(prompt).__name__} is neither text nor token ids",
                where=f"prompts[{i}]",
                fix="text, or a list of token ids",
            )
        rows.append(
            tokenizer.encode(prompt) if tokenizer and isinstance(prompt, str) else list(prompt)  # pyright: ignore[reportArgumentType]
        )
    return rows


def check_prompts(
    rows: Sequence[Sequence[int]],
    config: Any,
    *,
    max_new_tokens: int,
    max_context: int | None = None,
    samples: int = 1,
) -> None:
    """Refuses what a model cannot answer; it takes the model's config alone.

    Args:
        rows: Token ids of each prompt.
        config: A `DecoderConfig`.
        max_new_tokens: Most tokens of an answer.
        max_context: Most tokens of a prompt and its answer; None: as many as the model has.
        samples: Answers for each prompt.

    Raises:
        BadPrompt: TP140, for prompts that are empty, too long, or have tokens the model has not.
    """
    problems = Problems()
    vocab = config.vocab_size
    longest = getattr(config, "max_position_embeddings", None)
    limit = min((n for n in (longest, max_context) if n is not None), default=None)
    for name, count in (("max_new_tokens", max_new_tokens), ("samples", samples)):
        if count < 1:
            problems.add(BadPrompt(f"{name} is {count}", where=name, fix="1 or more"))
    if not rows:
        problems.add(BadPrompt("no prompts", where="prompts", fix="at least one"))
    for i, row in enumerate(rows):
        where = f"prompts[{i}]"
        if not row:
            problems.add(BadPrompt("no tokens", where=where, fix="at least one token"))
        elif unknown := [t for t in row if not 0 <= t < vocab]:
            problems.add(
                BadPrompt(
                    f"token {unknown[0]} of a vocabulary of {vocab}",
                    where=where,
                    fix="the tokenizer that belongs to the model",
                )
            )
        if limit is not None and len(row) + max_new_tokens > limit:
            problems.add(
                BadPrompt(
                    f"{len(row)} tokens and {max_new_tokens} new ones, where {limit} fit",
                    where=where,
                    fix=f"max_new_tokens={max(limit - len(row), 0)}, or a shorter prompt",
                )
            )
    problems.raise_any()


def _slots(count: int) -> int:
    return max(FEWEST_SLOTS, 1 << (count - 1).bit_length())


def _batch(
    setting: Setting, rows: Sequence[Sequence[int]], samples: int, key: jax.Array
) -> tuple[jax.Array, ...]:
    """Arguments of `prompt_program`: padded in front, and with rows that have ended behind."""
    shape = setting.plan.mesh if setting.plan is not None else None
    ways = 1 if shape is None else shape.batch_ways
    asked = [row for row in rows for _ in range(samples)]
    batch = -(-len(asked) // ways) * ways
    tokens = np.zeros((batch, setting.prompt_slots), np.int32)
    first = np.full(batch, setting.prompt_slots - 1, np.int32)
    for i, row in enumerate(asked):
        first[i] = setting.prompt_slots - len(row)
        tokens[i, first[i] :] = row
    done = np.arange(batch) >= len(asked)
    which = np.arange(batch)
    fold = jax.vmap(lambda i, j: jax.random.fold_in(jax.random.fold_in(key, i), j))
    keys = fold(which // samples, which % samples)
    arrays = (tokens, first, done, keys)
    if shape is None or setting.mesh is None:
        return tuple(map(jnp.asarray, arrays))
    place = NamedSharding(setting.mesh, PartitionSpec(shape.batch or None))
    return tuple(jax.device_put(x, place) for x in arrays)


class _Texts:
    """What the host knows of a batch: tokens, text, and which rows a stop string has ended."""

    def __init__(
        self,
        tokenizer: TextCodec | None,
        stop: tuple[str, ...],
        num_rows: int,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.tokenizer, self.stop, self.on_text = tokenizer, stop, on_text
        self.text, self.shown = [""] * num_rows, [0] * num_rows
        self.is_stopped = np.zeros(num_rows, bool)
        self.step = 0

    @property
    def all_done(self) -> bool:
        """Whether no row goes on."""
        return bool((self.done | self.is_stopped).all())

    def take(self, progress: Progress) -> None:
        """Reads what the devices have come to."""
        num_rows = len(self.text)
        fetched = (progress.tokens, progress.nats, progress.num_new, progress.done)
        tokens, nats, count, done = (_fetch(x)[:num_rows] for x in fetched)
        self.tokens, self.nats, self.count, self.done = tokens, nats, count, done
        self.step = int(_fetch(progress.step))
        for row in range(num_rows):
            if self.tokenizer is not None and not self.is_stopped[row]:
                self._read(row, self.tokenizer)

    def _read(self, row: int, tokenizer: TextCodec) -> None:
        text = tokenizer.decode(self.tokens[row, : self.count[row]].tolist())
        found = [text.find(word) for word in self.stop if word in text]
        if found:
            text, self.is_stopped[row] = text[: min(found)], True
        self.text[row] = text
        # Half a character, and what may become a stop string, wait.
        ends = bool(self.is_stopped[row] or self.done[row])
        safe = len(text) if ends else len(text.rstrip("\ufffd")) - max(map(len, self.stop or [""]))
        if self.on_text is not None and safe > self.shown[row]:
            self.on_text(row, text[self.shown[row] : safe])
            self.shown[row] = safe

    def stopped(self, progress: Progress) -> Progress:
        """The state with rows ended that hold a stop string."""
        if not (self.is_stopped & ~self.done).any():
            return progress
        done = np.ones(progress.done.shape, bool)
        done[: len(self.done)] = self.done | self.is_stopped
        return progress._replace(done=jax.device_put(done, progress.done.sharding))

    def answers(self, samples: int, end_tokens: tuple[int, ...]) -> list[Answer]:
        """The result."""
        found: list[Answer] = []
        for row, text in enumerate(self.text):
            tokens = tuple(self.tokens[row, : self.count[row]].tolist())
            is_end = bool(tokens) and tokens[-1] in end_tokens
            if self.on_text is not None and len(text) > self.shown[row]:
                self.on_text(row, text[self.shown[row] :])
            found.append(
                Answer(
                    prompt=row // samples,
                    sample=row % samples,
                    tokens=tokens,
                    log_probabilities=tuple((-self.nats[row, : len(tokens)]).tolist()),
                    text=text,
                    ended="stop" if self.is_stopped[row] else "end" if is_end else "length",
                )
            )
        return found


def _fetch(x: jax.Array) -> NDArray[Any]:
    """An array on the host, whole in every process."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
