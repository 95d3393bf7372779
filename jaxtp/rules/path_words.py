"""What the names in a path say.

The vocabulary itself is data in `words.py`.
"""

import re
from functools import cache
from typing import NamedTuple

from jaxtp.rules.words import (
    ANYWHERE,
    AROUND,
    ATTENTION_BLOCK,
    BIASES,
    EXPERT_BLOCK,
    GENERIC,
    IN_ATTENTION,
    IN_MLP,
    LEAVES,
    MLP_BLOCK,
    SHARED_EXPERT,
    WRAPPERS,
    Word,
)


class Name(NamedTuple):
    """One path, read.

    Attributes:
        word: What it is for.
        bias: Whether the leaf is a bias or a norm's offset.
        experts: Whether it sits among stacked or listed experts.
        stem: The path without what says only the kind of array, so that a bias and its kernel
            agree.
        follows: For an array that lies along a weight of its module, which part it is:
            `ADAPTER_A`, `ADAPTER_B`, `MAGNITUDE` or `SCALES`; "" for others.
    """

    word: Word
    bias: bool
    experts: bool
    stem: str
    follows: str = ""


ADAPTER_A, ADAPTER_B, MAGNITUDE, SCALES = "a", "b", "magnitude", "scales"

_SIDES = {"a": ADAPTER_A, "down": ADAPTER_A, "b": ADAPTER_B, "up": ADAPTER_B}


def follower(raw: list[str]) -> tuple[str, str]:
    """Which part of an adapter or of a quantised weight a path is, and the stem of its weight.

    Args:
        raw: The path's parts.

    Returns:
        One of `Name.follows` and a stem; ("", "") for other paths.

    >>> follower(["q_proj", "lora_A", "default", "weight"]), follower(["up", "kernel_lora_b"])
    (('a', 'q_proj'), ('b', 'up'))
    >>> follower(["attn", "wq_lora_a"]), follower(["up", "kernel", "array", "scale"])
    (('a', 'attn/wq'), ('scales', 'up'))
    """
    for i in range(len(raw) - 1, -1, -1):
        part = spaced(raw[i])
        found = re.search(r"\blora (?:embedding )?(a|b|down|up|magnitude)\b", part)
        below = i > 0 and spaced(raw[i - 1]) == "lora"
        if found or (below and part in _SIDES):
            side = _SIDES.get(found[1] if found else part, MAGNITUDE)
            before = re.split(r"[_.-]?lora", raw[i], flags=re.IGNORECASE)[0] if found else ""
            return side, _stem(raw[: i - below], before)
    found = re.search(r"(scales?|zeros?([_.-]?points?)?|zp|absmax)$", raw[-1], flags=re.IGNORECASE)
    if found is None:
        return "", ""
    return SCALES, _stem(raw[:-1], raw[-1][: found.start()].rstrip("_.-"))


def _stem(modules: list[str], before: str) -> str:
    """The stem of the array `before` in a module, which may only say what kind of array it is."""
    parts = [*modules, before] if before else modules
    while len(parts) > 1 and spaced(parts[-1]) in (*WRAPPERS, "q"):
        parts = parts[:-1]
    return "/".join(parts)


@cache
def spaced(part: str) -> str:
    """A path part in lower case with spaces between its words.

    >>> spaced("MultiHeadDotProductAttention_0"), spaced("q_proj"), spaced("dense_h_to_4h")
    ('multi head dot product attention 0', 'q proj', 'dense h to 4h')
    """
    part = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", part)
    return re.sub(r"[_\-. ]+", " ", part).strip().lower()


@cache
def _match(rules: tuple[tuple[str, Word], ...], text: str) -> Word:
    return next((word for pattern, word in rules if re.search(pattern, text)), Word.NONE)


def attention_word(part: str) -> Word:
    """What one path part would mean inside attention."""
    name = spaced(part).removesuffix(" bias").strip()
    word = _match(IN_ATTENTION, AROUND.sub("", name))
    return _match(IN_ATTENTION, name) if word is Word.NONE else word


def head_norm(stem: str) -> str:
    """For a norm of queries or keys, the part of its name that says so; "" for other norms.

    >>> head_norm("attn/q_layernorm/norms/0"), head_norm("layer/0/norm1")
    ('q', '')
    """
    near = [spaced(part) for part in stem.split("/") if not part.isdigit()][-2:]
    found = re.search(r"\b(query|key|q|kv?)\b", " / ".join(near))
    return found[0] if found else ""


def low_rank(stem: str) -> bool:
    """Whether a norm belongs to a low-rank projection rather than to heads."""
    return attention_word(stem.rpartition("/")[2]) in (Word.LOW_RANK, Word.KV)


def read(path: str, attention: frozenset[str] = frozenset()) -> Name:
    """What the names in a path say.

    The module's own name is read first, then, where it is generic ("dense", "output", a number),
    the module around it.

    Args:
        path: A parameter's path.
        attention: Paths of nodes known to be attention by their children.

    >>> read("h/0/attn/c_proj/kernel").word, read("h/0/mlp/c_proj/kernel").word
    (<Word.O: 'attention output'>, <Word.OUT: 'out of the MLP'>)
    """
    raw = path.split("/")
    parts = [spaced(p) for p in raw]
    leaf = parts[-1]
    follows, weight = follower(raw)
    if follows and follows != SCALES:
        return Name(Word.FOLLOWER, False, _among_experts(parts), weight, follows)
    modules = parts[:-1] if leaf in LEAVES and len(parts) > 1 else parts
    while len(modules) > 1 and len(modules) < len(parts) and modules[-1] in WRAPPERS:
        modules = modules[:-1]
    bias = leaf in BIASES or leaf.endswith(" bias")
    inside = len(modules) == 1 and "" in attention
    for i in range(max(0, len(modules) - 3), len(modules)):
        known = attention and "/".join(raw[: i + 1]) in attention
        inside = bool(known or ATTENTION_BLOCK.search(modules[i])) or (
            inside and not MLP_BLOCK.search(modules[i])
        )
    stem = "/".join(raw[: len(modules)])
    stem = re.sub(r"[_.]?bias$", "", stem) if bias else stem
    return Name(_word(modules, leaf, inside), bias, _among_experts(modules), stem)


def numbered(stem: str) -> tuple[str, int | None, str]:
    """A stem around its last number: what is before it, the number, and what is behind.

    >>> numbered("h/3/mlp/layers_2"), numbered("ff/net/0/proj"), numbered("mlp/up")
    (('h/3/mlp/layers_', 2, ''), ('ff/net/', 0, '/proj'), ('', None, ''))
    """
    found = re.search(r"^(.*?[/_]|)(\d+)(/[^/\d]*)?$", stem)
    return (found[1], int(found[2]), found[3] or "") if found else ("", None, "")


def in_mlp(prefix: str) -> bool:
    """Whether the start of a path ends in an MLP, or in a list or Sequential of one.

    >>> in_mlp("h/3/mlp/layers_"), in_mlp("ffn/net/"), in_mlp("Mlp_0/Dense_"), in_mlp("mlp/a/b/")
    (True, True, True, False)
    """
    return any(MLP_BLOCK.search(spaced(part)) for part in prefix.strip("/").split("/")[-2:])


def _among_experts(modules: list[str]) -> bool:
    context = "/".join(modules)
    return bool(EXPERT_BLOCK.search(context)) and not SHARED_EXPERT.search(context)


def _word(modules: list[str], leaf: str, in_attention: bool) -> Word:
    own = [m for m in modules if not m.isdigit()][-2:]
    name = own[-1].removesuffix(" bias").strip() if own else leaf
    word = _match(ANYWHERE, name)
    around = _match(ANYWHERE, own[-2]) if len(own) > 1 and name in GENERIC else Word.NONE
    if around in (Word.ROUTER, Word.HEAD):
        word = around
    if word is Word.TOKENS and leaf == "kernel":
        return Word.CONV  # a table is looked up, never multiplied: this embeds patches
    if word is not Word.NONE:
        return word
    if in_attention:
        word = attention_word(name)
        # Megatron-LM's self_attention.query_key_value holds (heads, 3, head_dim), or with fewer kv
        # heads (kv heads, queries + 2, head_dim), and so do wqkv of others; elsewhere the name says
        # nothing about the order.
        if word is Word.QKV and own[-2:] == ["self attention", "query key value"]:
            return Word.QKV_PER_HEAD
        if word is Word.QKV and name == "wqkv":
            return Word.QKV_PER_GROUP
        if word is not Word.NONE:
            return word
    if len(own) > 1 and re.search(r"^(lm heads?|predictions|cls)$", own[-2]):
        return Word.HEAD
    if leaf in ("scale", "gamma"):
        return Word.NORM
    word = _match(IN_MLP, name)
    return word if word is not Word.NONE or len(own) < 2 else _match(IN_MLP, own[-2])
