"""Settings from text: JSON, TOML or YAML, in jaxtp's or DeepSpeed's spelling, read strictly."""

import dataclasses
import difflib
import functools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from jaxtp.config.deepspeed import TABLE, Line, translate, with_keys
from jaxtp.config.settings import Config, check_ranges, settings
from jaxtp.errors import BadConfig, Problems, join

Form = Literal["json", "toml", "yaml"]

FORMS: Mapping[str, Form] = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
"""Form of a file by its suffix; others are JSON."""


def load(path: Path) -> tuple[Config, tuple[Line, ...]]:
    """The settings in a file, and what became of each DeepSpeed key.

    Raises:
        BadConfig: TP020, as for `parse`, or if the file cannot be read.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as err:
        raise BadConfig(
            f"cannot read it: {err}",
            where=str(path),
            fix=f'name a text file; a preset is a setting in one, model = "{path.stem}", and what '
            "jaxtp preflight --model takes",
        ) from None
    return parse(text, FORMS.get(path.suffix.lower(), "json"), name=path.name)


def parse(text: str, form: Form = "json", *, name: str = "") -> tuple[Config, tuple[Line, ...]]:
    """The settings in a text, in jaxtp's spelling, DeepSpeed's, or both.

    Args:
        text: One object of settings.
        form: What it is written in.
        name: The file's name, for messages.

    Returns:
        The config, and one line for each DeepSpeed key: mapped or replaced.

    Raises:
        BadConfig: TP020, for text of another form, an unknown key, a value of the wrong type, a
            DeepSpeed key that is refused, or one setting given twice. All of them at once.
    """
    known = list(settings())
    given = _read(text, form, name)
    settled, origins, lines = translate(given, {key.split(".")[0] for key in known})
    try:
        return _validated(settled, origins), lines
    except BadConfig as error:
        raise with_keys(error, lines) from None


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The same settings with some others, by their dotted names, checked as in a file.

    Args:
        config: Settings.
        changes: For example `{"mesh.tp": 4, "remat": "full"}`.

    Raises:
        BadConfig: TP020, for an unknown name, a value of the wrong type or out of range.
    """
    tree: dict[str, Any] = dataclasses.asdict(config)
    for name, value in changes.items():
        *path, last = name.split(".")
        place: Any = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return _validated(tree, {})


def _validated(tree: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    from pydantic import ValidationError

    known = list(settings())
    try:
        # As JSON text, where pydantic can be strict and still build dataclasses from objects.
        config = _adapter().validate_json(json.dumps(tree, default=str))
    except ValidationError as err:
        problems = Problems()
        refusals = [_refusal(error, known, origins) for error in err.errors()]
        # Every alternative of a union complains on its own; the first complaint will do.
        for refusal in {refusal.where: refusal for refusal in reversed(refusals)}.values():
            problems.add(refusal)
        problems.raise_any()
        raise AssertionError("pydantic refused a config without an error") from err
    check_ranges(config)
    return config


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Config)


def _read(text: str, form: Form, name: str) -> dict[str, Any]:
    try:
        if form == "toml":
            data: Any = tomllib.loads(text)
        elif form == "yaml":
            data = yaml.load(text, _Loader)
        else:
            data = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_not_a_number)
    except json.JSONDecodeError as err:
        raise _malformed(form, name, err.msg, err.lineno, err.colno) from None
    except tomllib.TOMLDecodeError as err:
        raise _malformed_toml(text, name, str(err)) from None
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
        what = getattr(err, "problem", None) or str(err)
        raise _malformed(form, name, what, line, column) from None
    if not isinstance(data, dict):
        raise BadConfig(
            f"a {type(data).__name__} is not settings", where=name, fix='{"model": ...}'
        )
    return data


def _malformed(form: str, name: str, what: str, line: int, column: int) -> BadConfig:
    place = f"line {line} column {column}" if line else ""
    return BadConfig(
        f"not {form.upper()}: {what}",
        where=", ".join(part for part in (name, place) if part),
        fix=f"correct the {form.upper()}" + (" there or just before" if line else ""),
    )


def _malformed_toml(text: str, name: str, message: str) -> BadConfig:
    # Until Python 3.14 the place is only in the message, and none where the text ends too early.
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message)
    if match is not None:
        return _malformed("toml", name, match[1], int(match[2]), int(match[3]))
    what = message.removesuffix(" (at end of document)")
    lines = text.splitlines() or [""]
    return _malformed("toml", name, what, len(lines), len(lines[-1]) + 1)


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object, unless a key is in it twice: JSON would take the last one and say nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _twins(next(name for name in names if names.count(name) > 1))
    return found


def _twins(name: str) -> BadConfig:
    return BadConfig("the key is given twice in one object", where=name, fix="keep one of them")


def _not_a_number(text: str) -> float:
    raise BadConfig(f"{text} is not JSON", fix="give a finite number")


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-4 is a number, and no key stands twice in one mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if len(set(names)) < len(names):
            raise _twins(next(name for name in names if names.count(name) > 1))
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML reads, wants a point and a sign: 1.0e-4.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def _refusal(error: Mapping[str, Any], known: list[str], origins: Mapping[str, str]) -> BadConfig:
    """What pydantic found wrong, by the name that stands in the file."""
    parts = [str(part) for part in error["loc"]]
    # Inside a union pydantic goes on with the name of the alternative that it tried.
    key = next(
        (".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in known),
        ".".join(parts),
    )
    where = origins.get(key, key)
    if error["type"] == "unexpected_keyword_argument":
        near = difflib.get_close_matches(key, (*known, *TABLE), n=1, cutoff=0.5)
        section = [name for name in known if name.startswith(f"{parts[0]}.")] or known
        fix = f"did you mean {near[0]}?" if near else f"known: {join(section, 20)}"
        return BadConfig("unknown key", where=where, fix=fix)
    given = error["input"]
    if error["type"] == "literal_error":
        # "'a', 'b' or 'c'", as pydantic spells it.
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        near = difflib.get_close_matches(str(given), choices, n=1)
        return BadConfig(
            f"is {json.dumps(given, default=str)}, not one of {error['ctx']['expected']}",
            where=where,
            fix=f"did you mean {near[0]}?" if near else f"one of {error['ctx']['expected']}",
        )
    what = f"{error['msg']}; got {json.dumps(given, default=str)}"
    return BadConfig(what, where=where, fix=f"see the help of --{key}")
