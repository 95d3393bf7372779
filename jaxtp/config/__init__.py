"""Settings: a frozen dataclass a concern, read strictly from JSON, TOML or a DeepSpeed file.

In: text. Out: a `Config`, or one error that lists all that is wrong. Never knows: models, arrays,
devices.
"""
