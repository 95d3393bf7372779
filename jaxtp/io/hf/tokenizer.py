"""The text side of a Hugging Face folder: its tokenizer, its chat template, how it ends answers."""

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxtp.errors import BadPrompt, BadWeights, join
from jaxtp.io.json_text import read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
"""What templates may ask for, by the names of tokenizer_config.json."""

Message = Mapping[str, Any]
"""One turn of a chat: a `role` and its `content`."""


class Tokenizer:
    """Text to token ids and back, as the folder's own files say; for `jaxtp.generate`.

    Attributes:
        folder: The folder.
        num_tokens: One more than the largest id.
    """

    def __init__(self, folder: str | Path) -> None:
        """Reads the folder's tokenizer.

        Raises:
            BadPrompt: TP140, if the packages of `jaxtp[hf]` are missing, or the folder has no
                tokenizer.json, or one that cannot be read.
        """
        self.folder = Path(folder)
        file = self.folder / TOKENIZER
        try:
            import tokenizers
        except ImportError:
            _lacks_package("tokenizers", file)
        if not file.is_file():
            raise BadPrompt(
                f"the folder has no {TOKENIZER}" if self.folder.is_dir() else "no such folder",
                where=str(self.folder),
                fix="download it with the weights; AutoTokenizer.from_pretrained(...)"
                ".save_pretrained(folder) writes it from older files",
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as err:  # the package raises nothing narrower
            raise BadPrompt(
                f"not a tokenizer: {err}", where=str(file), fix="download the file again"
            ) from None
        settings = self.folder / TOKENIZER_CONFIG
        self._settings = read_json(settings) if settings.exists() else {}
        self.num_tokens = 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def check(self, vocab_size: int) -> None:
        """Refuses a tokenizer with more tokens than a model has.

        Raises:
            BadPrompt: TP140, naming a token that the model has no row for.
        """
        if self.num_tokens > vocab_size:
            token = self._tokenizer.id_to_token(self.num_tokens - 1)
            raise BadPrompt(
                f"token {self.num_tokens - 1}, {token!r}, of a model with {vocab_size} tokens",
                where=str(self.folder / TOKENIZER),
                fix="the tokenizer that belongs to the model",
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with those that the tokenizer puts around it."""
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode([int(token) for token in tokens])

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, up to where the model's answer begins.

        Args:
            messages: Turns, each with a `role` and its `content`, as the folder's template takes
                them.

        Raises:
            BadPrompt: TP140, if the folder has no template, or its template refuses the messages.
        """
        return self._tokenizer.encode(self._render(messages), add_special_tokens=False).ids

    @property
    def template(self) -> str:
        """The chat template, "" if the folder has none."""
        file = self.folder / TEMPLATE
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = self._settings.get("chat_template") or ""
        if isinstance(found, list):  # several by name
            named = {one["name"]: one["template"] for one in found}
            found = named.get("default") or next(iter(named.values()), "")
        return str(found)

    def _render(self, messages: Sequence[Message]) -> str:
        where, template = str(self.folder), self.template
        if not template:
            raise BadPrompt(
                f"a chat, and neither {TEMPLATE} nor a chat_template in {TOKENIZER_CONFIG}",
                where=where,
                fix="the folder of a model that was trained to chat; or plain text: "
                "jaxtp generate --raw",
            )
        try:
            import jinja2
            import jinja2.sandbox
        except ImportError:
            _lacks_package("jinja2", self.folder / TEMPLATE)
        # As transformers runs them: a template is a program that a stranger wrote.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        names: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
        special = {name: _token(self._settings.get(name)) for name in SPECIAL}
        try:
            return environment.from_string(template).render(
                messages=list(messages), add_generation_prompt=True, **special, **names
            )
        except jinja2.TemplateError as err:
            raise BadPrompt(
                f"the chat template says: {err}",
                where=where,
                fix="messages as the model takes them",
            ) from None


def _token(found: Any) -> str:
    """A special token, written as text or as an object with its text."""
    return str(found.get("content", "") if isinstance(found, Mapping) else found or "")


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _lacks_package(name: str, file: Path) -> NoReturn:
    raise BadPrompt(
        f"{name} is not installed", where=str(file), fix='pip install "jaxtp[hf]"'
    ) from None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How the authors of a model have it answer; what they left out is None.

    Attributes:
        end_tokens: Ids that end an answer.
        temperature: As in `jaxtp.generate`; 0 where they do not draw.
        top_k: Likewise.
        top_p: Likewise.
        min_p: Likewise.
    """

    end_tokens: tuple[int, ...]
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def read_published(folder: str | Path) -> Published:
    """The generation_config.json of a folder.

    Raises:
        BadPrompt: TP140, if there is none, it names no token that ends an answer, or it is damaged.
    """
    file = Path(folder) / GENERATION
    fix = "the file from where the weights come from; or jaxtp generate --end-tokens ID"
    if not file.is_file():
        raise BadPrompt(
            f"no {GENERATION}, so that no token is known to end an answer",
            where=str(folder),
            fix=fix,
        )
    try:
        found = read_json(file)
    except BadWeights as err:
        raise BadPrompt(f"cannot be read: {err}", where=str(file), fix=fix) from None
    said = found.get("eos_token_id")
    ends: list[Any] = said if isinstance(said, list) else [said]
    if not ends or not all(isinstance(token, int) and token >= 0 for token in ends):
        raise BadPrompt(f"eos_token_id is {said}", where=str(file), fix=fix)
    draws = bool(found.get("do_sample", False))
    numbers: dict[str, Any] = {
        name: found.get(name) if draws else None for name in ("top_k", "top_p", "min_p")
    }
    bad = [n for n, v in numbers.items() if not isinstance(v, int | float | None)]
    temperature = found.get("temperature", 1.0) if draws else 0.0
    if bad or not isinstance(temperature, int | float):
        raise BadPrompt(
            f"no numbers: {join(bad or ['temperature'])}", where=str(file), fix="download it again"
        )
    return Published(end_tokens=tuple(ends), temperature=float(temperature), **numbers)
