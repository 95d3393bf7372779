"""Which mesh: every way to spread a run over a machine, priced, and the best few compiled."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtp.compile.report import Report
from jaxtp.config.presets import preset
from jaxtp.config.settings import Batch, Config
from jaxtp.cost.candidates import POLICIES, candidates
from jaxtp.cost.ranking import Candidate, Ranking, rank
from jaxtp.cost.step import price
from jaxtp.cost.strategy import AXES, ModelSizes, Strategy
from jaxtp.errors import BadUsage, SizeMismatch
from jaxtp.errors.arguments import FUNCTION, TEXT, Kind, checked, is_whole, number
from jaxtp.hardware.gpus import Target
from jaxtp.io.model_functions import is_model_function, own_model
from jaxtp.mesh.axes import Axis
from jaxtp.models import LlamaConfig
from jaxtp.train.attention import choose_attention, obstacle
from jaxtp.train.fixed_settings import checked_fixed, fixed_fields
from jaxtp.train.mesh_advice import Pricing, mesh_text
from jaxtp.train.own_search import search_own
from jaxtp.train.planning import model_of
from jaxtp.train.preflight import preflight_config
from jaxtp.train.pricing import JAXTP, fused_on, sizes_of, wires_of
from jaxtp.train.search_result import (
    Asked,
    Found,
    Search,
    compiled_rows,
    machine_of,
    rows_of,
)


def check_sizes(batch: int, seq: int) -> None:
    """Refuses what is no size of a batch.

    Raises:
        BadUsage: TP132, for what is no whole number, 0 or more.
    """
    if not is_whole(batch) or not 0 <= batch < 2**31:
        raise BadUsage(
            f"batch is {batch!r}",
            where="batch",
            fix="sequences of the global batch, 1 or more; 0 for the file's",
        )
    if not is_whole(seq) or not 0 <= seq < 2**31:
        raise BadUsage(
            f"seq is {seq!r}",
            where="seq",
            fix="tokens of one sequence, 1 or more; 0 for the file's",
        )


def run_of(run: Config | str, *, target: str = "", batch: int = 0, seq: int = 0) -> Config:
    """The run to search a mesh for.

    Args:
        run: Settings, or a preset's name.
        target: The machine, instead of the settings'; by default h100:1x8.
        batch: Sequences of the global batch, instead of the settings'.
        seq: Tokens of one sequence, instead of the settings'.

    Raises:
        BadUsage: TP132, without a batch, or for what is none.
        BadConfig: TP020, for an unknown model.
        SizeMismatch: TP003, for more tokens than a model has positions.
    """
    check_sizes(batch, seq)
    config = preset(run) if isinstance(run, str) else run
    # Mesh, accumulation and stages are what is searched; of a preset the batch is not meant either.
    size = batch or (0 if isinstance(run, str) else config.batch.size)
    if not size:
        raise BadUsage("no batch", where="batch", fix="sequences of the global batch")
    config = dataclasses.replace(
        config,
        target=target or config.target or "h100:1x8",
        seq_len=seq or config.seq_len,
        batch=Batch(size=size),
    )
    longest = sizes_of(model_of(config), config.seq_len).positions
    if not longest or config.seq_len <= longest:
        return config
    if seq or not isinstance(run, str):
        raise SizeMismatch(
            f"{config.seq_len} tokens, but the position table of {config.model} has {longest} rows",
            where="seq" if seq else "seq_len",
            fix=f"at most {longest} tokens",
        )
    return dataclasses.replace(config, seq_len=longest)


@checked(
    run=Kind(
        lambda value: isinstance(value, Config | str) or callable(value),
        "settings, a preset's name, or a function that returns (fn, params, inputs)",
        BadUsage,
    ),
    target=TEXT.raising(BadUsage),
    time_limit=number(above=0).raising(BadUsage),
    on_progress=FUNCTION.raising(BadUsage),
)
def search(
    run: Config | str | Callable[[], Any],
    *,
    target: str = "",
    batch: int = 0,
    seq: int = 0,
    fixed: Mapping[str, Any] | None = None,
    limit: int = 12,
    compile_best: int = 3,
    network: float = 0.0,
    time_limit: float = 900.0,
    on_progress: Callable[[str, float], None] = lambda *_: None,
) -> Search:
    """The best meshes for a run, with what each of the others would cost.

    Candidates are priced from sizes alone; the best are compiled by the real compiler, so that
    their memory and collectives are facts. One that jaxtp refuses, or that does not fit once it is
    compiled, makes room for the next.

    Args:
        run: Settings, of which `model`, `target`, `seq_len`, `batch.size` and all that is not
            searched are taken; a preset's name; or anybody's model: a function without arguments
            that returns `(fn, params, inputs)` as `make_plan` takes them, or
            "package.module:function", its place.
        target: The machine, instead of the settings'; by default h100:1x8.
        batch: Sequences of the global batch, instead of the settings'.
        seq: Tokens of one sequence, instead of the settings'; a function's inputs say it.
        fixed: Setting -> value that every candidate has, e.g. `{"mesh.tp": 8}`.
        limit: Meshes in the result, besides those that compiling found not to run or to fit.
        compile_best: How many to compile; 0 for prices alone.
        network: Bytes/s that each GPU sends out of its NVLink domain, instead of the data sheet's.
        time_limit: Seconds that the compiler may take for each.
        on_progress: Called with what is done and the seconds so far.

    Raises:
        BadTarget: TP116, without a target.
        BadUsage: TP132, if no candidate is left, a setting cannot be fixed, or an argument is no
            run, no size or no count.
        BadConfig: TP020, for an unknown model.
        SizeMismatch: TP003, for more tokens than the model has positions.
    """
    asked = Asked(limit, compile_best, network, time_limit, on_progress)
    fixed = checked_fixed(fixed)
    check_sizes(batch, seq)
    batch, seq = int(batch), int(seq)
    if callable(run) or (isinstance(run, str) and is_model_function(run)):
        if seq:
            raise BadUsage(
                "a model of one's own has its length in its inputs",
                where="seq",
                fix="other inputs, returned by the function",
            )
        return search_own(own_model(run), target or "h100:1x8", batch, fixed, asked)
    config = run_of(run, target=target, batch=batch, seq=seq)
    machine, model_config = machine_of(config.target, network), model_of(config)
    sizes = sizes_of(model_config, config.seq_len)
    found = candidates(
        sizes,
        machine.num_devices,
        config.batch.size,
        fixed=fixed_fields(fixed),
        domain=wires_of(machine).domain,
        interleaves=isinstance(model_config, LlamaConfig),
    )
    found = dataclasses.replace(found, fused=fused_on(config, found))
    pricing = _pricing(sizes, found)
    ranking = pricing.rank(machine)

    def compiled(row: Found, show: Callable[[float], None]) -> Report:
        assert row.config is not None
        return preflight_config(row.config, time_limit=time_limit, on_progress=show)[1]

    rows = rows_of(ranking, lambda candidate: config_for(config, candidate))
    return Search(
        target=machine,
        model=config.model,
        batch=config.batch.size,
        seq=config.seq_len,
        rows=compiled_rows(ranking, rows, asked, compiled),
        ranking=ranking,
        pricing=pricing,
        notes=tuple(_attention(rows[0], sizes, machine)),
    )


def _attention(first: Found, sizes: ModelSizes, machine: Target) -> Iterator[str]:
    """Why attention is not cuDNN's, and what the first mesh would take with it if it can be."""
    assert first.config is not None
    chosen, text = choose_attention(first.config, on_gpu=True, ahead=True)
    if chosen.attention == "cudnn":
        return
    if first.config.attention == "auto" and not obstacle(first.config):
        fused = Strategy(**{**first.candidate.settings, "fused": True})
        then = float(price(sizes, fused, wires_of(machine), JAXTP).total)
        text += f"; with it {mesh_text(first.candidate)} would take {then:,.3f} s"
    yield f"attention: {text}"


def _pricing(sizes: ModelSizes, strategies: Strategy) -> Pricing:
    """How a decoder of these sizes is priced under the same strategies on any machine."""

    def ranked(target: Target) -> Ranking:
        memory = target.device.memory_bytes
        return rank(sizes, strategies, wires_of(target), JAXTP, memory_bytes=memory)

    def message_bytes(one: Candidate) -> float:
        tokens = one.settings["micro_batch"] * sizes.seq / one.settings[Axis.CP]
        return 2.0 * tokens * sizes.hidden

    messages = "a layer waits for 4 all-reduces"
    return Pricing(rank=ranked, message_bytes=message_bytes, messages=messages)


def config_for(config: Config, candidate: Candidate) -> Config:
    """Settings that run a candidate.

    Args:
        config: All that was not searched.
        candidate: What was.
    """
    s = candidate.settings
    names = {int(value): name for name, value in POLICIES.items()}
    overlap = "aggressive" if s["interleaved"] else "auto"
    rounds = {"rounds": s["rounds"]} if s["pp"] > 1 else {"rounds": 1}
    return dataclasses.replace(
        config,
        remat=names[s["recompute"]],
        mesh=dataclasses.replace(config.mesh, **{axis: s[axis] for axis in AXES}),
        batch=dataclasses.replace(
            config.batch, micro_size=s["micro_batch"], accumulation=s["micro_batches"]
        ),
        pipeline=dataclasses.replace(config.pipeline, micro_batches=0, **rounds),
        zero=dataclasses.replace(config.zero, stage=s["zero"]),
        communication=dataclasses.replace(
            config.communication, sequence_parallel=bool(s["sequence_parallel"]), overlap=overlap
        ),
    )
