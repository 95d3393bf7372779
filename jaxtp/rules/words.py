"""What names mean: all the name knowledge there is, as data.

Stage in: one path. Stage out: its `Word`. Shapes are read elsewhere (`names.py`): a name says what
a parameter is for, never which dim of it is which.

Sources of the vocabulary: the module names of Flax (`MultiHeadDotProductAttention`, `Dense`), of
Hugging Face transformers, Megatron-LM, T5/t5x/MaxText and the Gemma reference code.
"""

import re
from enum import StrEnum
from functools import cache
from typing import NamedTuple

LEAVES = frozenset(
    [
        "kernel",
        "weight",
        "weights",
        "w",
        "scale",
        "bias",
        "b",
        "embedding",
        "embeddings",
        "table",
        "gamma",
        "beta",
        "value",
    ]
)
"""Last path parts that say what kind of array it is, but not what it is for."""

GENERIC = frozenset(["layer", "linear", "dense", "classifier", "proj", "w"])
"""Modules named after what they are; the module around them says what they are for."""

BIASES = frozenset(["bias", "b", "beta"])


class Word(StrEnum):
    """What a name says."""

    Q = "query"
    K = "key"
    V = "value"
    KV = "key and value"
    QKV = "query, key and value"
    QKV_PER_HEAD = "query, key and value, per head"
    LOW_RANK = "low-rank factor"
    Q_UP = "query up-projection"
    KV_UP = "key/value up-projection"
    O = "attention output"  # noqa: E741
    IN = "into the MLP"
    OUT = "out of the MLP"
    IN_FUSED = "gate and up"
    ROUTER = "router"
    TOKENS = "token table"
    HEAD = "output head"
    POSITION = "position or type table"
    HEAD_TABLE = "relative position bias"
    NORM = "norm"
    CONV = "convolution"
    NONE = ""


ATTENTION = frozenset(
    {Word.Q, Word.K, Word.V, Word.KV, Word.QKV, Word.QKV_PER_HEAD, Word.O}
    | {Word.LOW_RANK, Word.Q_UP, Word.KV_UP}
)
ENTERS_ATTENTION = ATTENTION - {Word.O, Word.LOW_RANK}
FUSED = frozenset({Word.QKV, Word.IN_FUSED})

# Rules are tried in this order on the module's own name, lower case, digits kept. `^` and `$` are
# the ends of one path part; `\b` also holds at `_`, since parts are spelled with spaces for
# matching.
ANYWHERE: tuple[tuple[str, Word], ...] = (
    (r"\bnorm|norm\b|\bln\b|\bln ?[\df]|layer ?norm|\bgamma\b|\bbn\b|batch ?stats", Word.NORM),
    (r"\blora\b|\badapter\b", Word.LOW_RANK),
    (r"\brel|\brelative|\bt5 bias|alibi|\bsinks?\b", Word.HEAD_TABLE),
    (r"\bpos|position|\bwpe\b|token type|segment|\btype emb|timestep|time emb", Word.POSITION),
    (r"conv(?!1d)|patch|\bstem\b", Word.CONV),
    (r"\brouter\b|\bgate weight|^gating$|expert gate", Word.ROUTER),
    (
        r"\b(lm head|logits?|logit ?dense|logits? dense|embed out|unembed\w*|vocab projector|"
        r"output embed\w*|final logits bias)\b",
        Word.HEAD,
    ),
    (r"embed|\bwte\b|\bshared\b|\bvocab(ulary)?$|^tok(en)?s?$", Word.TOKENS),
)

IN_ATTENTION: tuple[tuple[str, Word], ...] = (
    (r"^(c attn|w?qkv|.*qkv.*|in proj|query key value)$", Word.QKV),
    (r"^w?(q|kv|k|v) a\b|^w?(q|kv) (down|compress)|a proj", Word.LOW_RANK),
    (r"^w?q (b|up)\b", Word.Q_UP),
    (r"^w?kv? (b|up)\b", Word.KV_UP),
    (r"^w?kv\b|key value", Word.KV),
    (r"^(w ?q|q|query|to q|q proj)\b", Word.Q),
    (r"^(w ?k|k|key|to k)\b", Word.K),
    (r"^(w ?v|v|value|to v)\b", Word.V),
    (r"\bgate\b", Word.NONE),
    (r"^(w ?o|o|out|output|to out|dense|proj|projection|c proj|attn vec|linear|post)\b", Word.O),
)

IN_MLP: tuple[tuple[str, Word], ...] = (
    (r"gate up|up gate|w13\b|wi fused|gate and up|in fused|gate_up", Word.IN_FUSED),
    (r"^(gate|gating|up|wi|w1|w3|fc1|fc in|lin1|c fc|dense h to 4h|intermediate)\b", Word.IN),
    (r"^(w gate|w up|in)\b", Word.IN),
    (r"^(down|wo|w2|fc2|fc out|lin2|c proj|dense 4h to h|output|w down|out)\b", Word.OUT),
)

ATTENTION_BLOCK = re.compile(r"attn|attention|\bmha\b")
EXPERT_BLOCK = re.compile(r"\bexperts?\b|\bmoe\b|\bmixture\b|sparse moe")
SHARED_EXPERT = re.compile(r"shared experts?")
RECURRENT = re.compile(r"^a log$|^time (decay|mix)")
"""Parameters that only recurrent mixers have: state-space models, gated delta nets, RWKV."""


class Name(NamedTuple):
    """One path, read.

    Attributes:
        word: What it is for.
        bias: Whether the leaf is a bias or a norm's offset.
        experts: Whether it sits among stacked or listed experts.
        stem: The path without what says only the kind of array, so that a bias and its kernel
            agree.
    """

    word: Word
    bias: bool
    experts: bool
    stem: str


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
    return _match(IN_ATTENTION, spaced(part).removesuffix(" bias").strip())


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
    modules = parts[:-1] if leaf in LEAVES and len(parts) > 1 else parts
    bias = leaf in BIASES or leaf.endswith(" bias")
    context = "/".join(modules)
    experts = bool(EXPERT_BLOCK.search(context)) and not SHARED_EXPERT.search(context)
    near = range(max(0, len(modules) - 3), len(modules))
    inside = len(modules) == 1 and "" in attention
    inside = inside or any(
        ATTENTION_BLOCK.search(modules[i]) or (attention and "/".join(raw[: i + 1]) in attention)
        for i in near
    )
    stem = "/".join(raw[: len(modules)])
    stem = re.sub(r"[_.]?bias$", "", stem) if bias else stem
    return Name(_word(modules, leaf, inside), bias, experts, stem)


def _word(modules: list[str], leaf: str, in_attention: bool) -> Word:
    own = [m for m in modules if not m.isdigit()][-2:]
    name = own[-1].removesuffix(" bias").strip() if own else leaf
    word = _match(ANYWHERE, name)
    if len(own) > 1 and name in GENERIC and _match(ANYWHERE, own[-2]) is Word.ROUTER:
        word = Word.ROUTER
    if word is Word.TOKENS and leaf == "kernel":
        return Word.CONV  # a table is looked up, never multiplied: this embeds patches
    if word is not Word.NONE:
        return word
    if in_attention:
        word = _match(IN_ATTENTION, name)
        # Megatron-LM's self_attention.query_key_value holds (heads, 3, head_dim); elsewhere the
        # name says nothing about the order.
        if word is Word.QKV and own[-2:] == ["self attention", "query key value"]:
            return Word.QKV_PER_HEAD
        if word is not Word.NONE:
            return word
    if len(own) > 1 and re.search(r"^(lm head|predictions|cls)$", own[-2]):
        return Word.HEAD
    word = _match(IN_MLP, name)
    return word if word is not Word.NONE or len(own) < 2 else _match(IN_MLP, own[-2])
