"""Settings as TOML text that `load` reads back."""

import json
from typing import Any

from jaxtp.config.settings import Config, settings


def to_toml(config: Config) -> str:
    """The settings that differ from the defaults, as TOML; `load` gives the same config back.

    Args:
        config: Any config.

    >>> print(to_toml(Config(model="gpt2", seq_len=64)))
    model = "gpt2"
    seq_len = 64
    <BLANKLINE>
    """
    usual = Config()
    tables: dict[str, list[str]] = {"": []}
    for name in settings():
        value = _at(config, name)
        if value != _at(usual, name):
            table, _, key = name.rpartition(".")
            tables.setdefault(table, []).append(f"{key} = {_text(value)}")
    blocks = ["\n".join(tables.pop(""))] if tables[""] else []
    blocks += [f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items() if lines]
    return "\n\n".join(blocks) + "\n"


def _at(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _text(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(key)} = {_text(one)}" for key, one in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, bool | str):
        return json.dumps(value)
    # Paths are text; numbers are written alike in Python and TOML.
    return repr(value) if isinstance(value, int | float) else json.dumps(str(value))
