"""`jaxtp generate`: answers of the model in a Hugging Face folder, from text to text."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.monitoring
import tyro

from jaxtp.config.named_files import check_writable, write_text
from jaxtp.errors import BadPrompt, BadUsage
from jaxtp.generation.run import Answer, check_prompts
from jaxtp.generation.run import generate as answer
from jaxtp.io.hf.config import read_fields
from jaxtp.io.hf.files import CONFIG
from jaxtp.io.hf.load import load_hf
from jaxtp.io.hf.tokenizer import Published, Tokenizer, read_published
from jaxtp.io.json_text import read_json
from jaxtp.mesh.build import make_mesh
from jaxtp.processes.startup import initialize

Unset = Annotated[float | None, tyro.conf.arg(help_behavior_hint="(default: the folder's)")]
UnsetCount = Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: the folder's)")]


def generate(
    folder: Annotated[Path, tyro.conf.Positional],
    *,
    prompt: tuple[str, ...] = (),
    file: Path | None = None,
    out: Path | None = None,
    tp: int = 1,
    dp: int = 1,
    max_new_tokens: int = 128,
    temperature: Unset = None,
    top_k: UnsetCount = None,
    top_p: Unset = None,
    min_p: Unset = None,
    stop: tuple[str, ...] = (),
    end_tokens: tuple[int, ...] = (),
    samples: int = 1,
    seed: int = 0,
    raw: bool = False,
    max_context: int = 0,
    dtype: str = "",
    quantize: Literal["none", "int8", "int4"] = "none",
) -> None:
    """Answer prompts with the model in a Hugging Face folder; text comes as it is made.

    Where there is no GPU, as many CPU devices are simulated as tp x dp.

    Args:
        folder: Holds config.json, *.safetensors, tokenizer.json and generation_config.json.
        prompt: What to answer, one or several.
        file: Or a file with one JSON object a line: `{"prompt": "..."}`, or `{"messages": [...]}`.
        out: Where answers go, one JSON object a line; otherwise to the terminal.
        tp: Devices along the tensor axis.
        dp: Replicas, over which prompts are spread.
        max_new_tokens: Most tokens of an answer.
        temperature: 0 takes the likeliest token; otherwise tokens are drawn.
        top_k: Draw from so many likeliest tokens.
        top_p: Draw from the fewest likeliest tokens with this probability together.
        min_p: Draw from tokens at least this likely, as a share of the likeliest one's probability.
        stop: Texts that end an answer.
        end_tokens: Ids that end an answer, instead of the folder's.
        samples: Answers for each prompt.
        seed: Of what is drawn.
        raw: Prompts are the text itself, and no turn of a chat.
        max_context: Most tokens of a prompt and its answer; by default as the config says.
        dtype: Type of weights and activations; by default that of the files.
        quantize: Kernels as integers of so many bits, a scale for each output.
    """
    if out is not None:
        check_writable(out)
    tokenizer = Tokenizer(folder)
    fields = read_json(folder / CONFIG)
    config = read_fields(fields, str(folder / CONFIG))
    tokenizer.check(config.vocab_size)
    given = Published(end_tokens=end_tokens, temperature=0.0) if end_tokens else None
    published = given or read_published(folder)
    own = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    asked = {name: getattr(published, name) if x is None else x for name, x in own.items()}
    drawn: dict[str, Any] = {name: x for name, x in asked.items() if x is not None}
    prompts = list(_prompts(prompt, file))
    rows = [_tokens(one, tokenizer, raw=raw) for one in prompts]
    limit = max_context or fields.get("max_position_embeddings")
    lengths: dict[str, Any] = {"max_new_tokens": max_new_tokens, "max_context": limit}
    check_prompts(rows, config, samples=samples, **lengths)
    initialize(cpu_devices=tp * dp)
    mesh = make_mesh(tp=tp, dp=dp, devices=jax.devices()[: tp * dp])
    types: dict[str, Any] = {"param_dtype": dtype or None, "dtype": dtype or None}
    model = load_hf(folder, mesh, pad_vocab=True, quantize=quantize, **types)[0]
    clock = _Clock()
    streams = out is None and len(rows) * samples == 1
    answers = answer(
        model,
        rows,
        tokenizer=tokenizer,
        stop=stop,
        end_tokens=published.end_tokens,
        samples=samples,
        key=jax.random.key(seed),
        on_text=_show if streams else None,
        on_tokens=clock.look,
        **lengths,
        **drawn,
    )
    if jax.process_index() == 0:
        _write(answers, prompts, out, streams=streams)
        print(clock.summary(answers), file=sys.stderr)


def _prompts(texts: Sequence[str], file: Path | None) -> Iterator[Any]:
    """What is asked: texts, or messages of a chat."""
    if bool(texts) == (file is not None):
        raise BadUsage(
            "prompts come from the command line or from a file",
            where="prompt",
            fix='--prompt "..." or --file prompts.jsonl',
        )
    yield from texts
    if file is None:
        return
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as err:
        raise BadUsage(f"cannot be read: {err.strerror}", where=str(file), fix="a file") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
            yield row["messages"] if "messages" in row else str(row["prompt"])
        except (ValueError, KeyError, TypeError):
            raise BadPrompt(
                f"no prompt: {line:.60}",
                where=f"{file}:{number}",
                fix='{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
            ) from None


def _tokens(asked: Any, tokenizer: Tokenizer, *, raw: bool) -> list[int]:
    if not isinstance(asked, str):
        return tokenizer.chat(asked)
    if raw:
        return tokenizer.encode(asked)
    return tokenizer.chat([{"role": "user", "content": asked}])


def _show(row: int, text: str) -> None:
    print(text, end="", flush=True)


def _write(
    answers: Sequence[Answer], prompts: Sequence[Any], out: Path | None, *, streams: bool
) -> None:
    if streams:
        print(flush=True)
        return
    if out is None:
        for one in answers:
            print(f"--- prompt {one.prompt}, sample {one.sample}, ended by {one.ended}")
            print(one.text)
        return
    rows = [{"asked": prompts[one.prompt], **dataclasses.asdict(one)} for one in answers]
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


class _Clock:
    """When tokens came, and how much of the time XLA compiled."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._looks: list[tuple[int, float, float]] = []
        self._compiled = 0.0
        # What JAX reports of each program: tracing, lowering and compiling it.
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            self._compiled += duration_secs

    def look(self, num_tokens: int) -> None:
        """Rows have come to this many tokens."""
        self._looks.append((num_tokens, time.monotonic() - self._start, self._compiled))

    def summary(self, answers: Sequence[Answer]) -> str:
        """One line on how many tokens came, and how fast, without the time of compiling."""
        total = sum(len(one.tokens) for one in answers)
        (_, first, before), (_, last, compiled) = self._looks[0], self._looks[-1]
        line = f"{total} tokens; the first after {max(first - before, 0):.3f} s"
        seconds = (last - compiled) - (first - before)
        if len(self._looks) > 1 and seconds > 0:
            line += f", then {(total - len(answers)) / seconds:,.1f} tokens/s"
        return f"{line}; compiled in {compiled:.1f} s"
