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
    CACHE,
    EXPERT_BLOCK,
    GENERIC,
    IN_ATTENTION,
    IN_MLP,
    INSIDE,
    LEAVES,
    MLP_BLOCK,
    PROJECTION,
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

_COLLECTION = re.compile(r"^(lora|adapters?)( params| weights| adapters?)?$")
"""Collections that hold nothing but adapters."""

_SIDES = {"a": ADAPTER_A, "down": ADAPTER_A, "b": ADAPTER_B, "up": ADAPTER_B}


def follower(raw: list[str]) -> tuple[str, str]:
    """Which part of an adapter or of a quantised weight a path is, and the stem of its weight.

    Args:
        raw: The path's parts.

    Returns:
        One of `Name.follows` and a stem; ("", "") for other paths.

    >>> follower(["q_proj", "lora_A", "default", "weight"]), follower(["up", "kernel_lora_b"])
    (('a', 'q_proj'), ('b', 'up'))
    >>> follower(["lora", "mlp", "up", "a"]), follower(["to_q_lora", "down", "kernel"])
    (('a', 'lora/mlp/up'), ('a', 'to_q'))
    >>> follower(["attn", "wq_lora_a"]), follower(["up", "kernel", "array", "scale"])
    (('a', 'attn/wq'), ('scales', 'up'))
    """
    for i in range(len(raw) - 1, -1, -1):
        part = spaced(raw[i])
        found = re.search(r"\blora (?:embedding )?(a|b|down|up|magnitude)\b", part)
        below = i > 0 and spaced(raw[i - 1]) == "lora"
        beside = i > 0 and spaced(raw[i - 1]).endswith(" lora")
        collected = 0 < i >= len(raw) - 2 and _COLLECTION.search(spaced(raw[0]))
        if found or (part in _SIDES and (below or beside or collected)):
            side = _SIDES.get(found[1] if found else part, MAGNITUDE)
            before = re.split(r"[_.-]?lora", raw[i], flags=re.IGNORECASE)[0] if found else ""
            return side, _stem(raw[: i - below], before)
    last = len(raw) - 1
    while last > 0 and raw[last].isdigit():  # a list of one scale for each dim
        last -= 1
    found = re.search(
        r"(scales?|zeros?([_.-]?points?)?|zp|absmax)$", raw[last], flags=re.IGNORECASE
    )
    if found is None:
        return "", ""
    return SCALES, _stem(raw[:last], raw[last][: found.start()].rstrip("_.-"))


def _stem(modules: list[str], before: str) -> str:
    """The stem of the array `before` in a module, which may only say what kind of array it is."""
    parts = [*modules, before] if before else modules
    parts = parts[: _outermost([spaced(part) for part in parts])]
    parts = [*parts[:-1], re.sub(r"(?<=.)[_.-]lora$", "", parts[-1])] if parts else parts
    while len(parts) > 1 and spaced(parts[-1]) in (*WRAPPERS, "q"):
        parts = parts[:-1]
    return "/".join(parts)


def _outermost(modules: list[str]) -> int:
    """How many modules there are down to a projection that holds nothing but its own layer."""
    inside = len(modules)
    if not inside:
        return 0
    while inside > 1 and INSIDE.search(modules[inside - 1]):
        inside -= 1
    return inside if PROJECTION.search(modules[inside - 1]) else len(modules)


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
    if leaf not in ("kernel", "weight", "bias") and any(map(CACHE.search, parts)):
        return Name(Word.CACHE, False, False, path)
    modules = parts[:-1] if leaf in LEAVES and len(parts) > 1 else parts
    while len(modules) > 1 and len(modules) < len(parts) and modules[-1] in WRAPPERS:
        modules = modules[:-1]
    modules = modules[: _outermost(modules)]
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
