"""What names mean: all the name knowledge there is, as data.

A name says what a parameter is for, never which dim of it is which: shapes tell that.

Sources of the vocabulary: the module names of Flax (`MultiHeadDotProductAttention`, `Dense`), of
Hugging Face transformers, Megatron-LM, T5/t5x/MaxText and the Gemma reference code.
"""

import re
from enum import StrEnum

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
        "qvalue",
        "qweight",
    ]
)
"""Last path parts that say what kind of array it is, but not what it is for."""

TABLES = frozenset(["embedding", "embeddings"])
"""Last path parts of arrays whose rows are looked up."""

WRAPPERS = frozenset(["kernel", "weight", "weights", "w", "array", "base layer", "base module"])
"""Modules around an array that say no more about it than `LEAVES` do."""

INSIDE = re.compile(r"^((dense|linear|dense general|einsum|aqt dot general) 0|qrhs|frozen)$")
"""Modules inside one that says what it is for, as Linen and AQT name them."""

PROJECTION = re.compile(r"^(q|k|v|o|kv|qkv|query|key|value|out|gate|up|down)( proj)?$")
"""Modules that hold one projection."""

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
    QKV_PER_GROUP = "query, key and value, per kv head"
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
    FOLLOWER = "follower of a weight"
    CACHE = "cache of keys and values"
    NORM = "norm"
    MODULATION = "modulation of norms"
    CONV = "convolution"
    NONE = ""


FUSED_QKV = frozenset({Word.QKV, Word.QKV_PER_HEAD, Word.QKV_PER_GROUP})
ATTENTION = FUSED_QKV | {
    *(Word.Q, Word.K, Word.V, Word.KV, Word.O, Word.LOW_RANK, Word.Q_UP, Word.KV_UP)
}
ENTERS_ATTENTION = ATTENTION - {Word.O, Word.LOW_RANK}

# Rules are tried in this order on the module's own name, lower case, digits kept. `^` and `$` are
# the ends of one path part; `\b` also holds at `_`, since parts are spelled with spaces for
# matching.
ANYWHERE: tuple[tuple[str, Word], ...] = (
    (r"\bada ln\b|modulation", Word.MODULATION),
    (r"\bnorm|norm\b|\bln\b|\bln ?[\df]|layer ?norm|\bgamma\b|\bbn\b|batch ?stats", Word.NORM),
    (r"\badapter\b", Word.LOW_RANK),
    (r"\brel pos [hw]\b", Word.POSITION),  # one row per distance, as wide as a head
    (
        r"\brel\b|\brelpos|\brelative|\bt5 bias|alibi|\bsinks?\b|\bpos bias [uv]$|^r [wr]( bias)?$",
        Word.HEAD_TABLE,
    ),
    (
        r"(?<!linear )\bpos(emb\w*)?\b|position|\bwpe\b|token type|segment|\btype emb|"
        r"timestep|time emb|rotary|\brope\b|\bfreqs?\b",
        Word.POSITION,
    ),
    # A pointwise convolution (ConvNeXt's pwconv) mixes no positions: it is a matrix.
    (r"(?<!pw)conv(?!1d)|patch|\bstem\b|^(x|context) embedder$", Word.CONV),
    (r"\brouter\b|\bgate weight|^gating$|expert gate", Word.ROUTER),
    (
        r"\b(lm heads?|logits?|logit ?dense|logits? dense|embed out|unembed\w*|vocab projector|"
        r"output embed\w*|final logits bias)\b|^softmax$",
        Word.HEAD,
    ),
    (r"embed|\bwte\b|\bemb\b|\bshared\b|\bvocab(ulary)?$|^(tok(en)?|word)s?$", Word.TOKENS),
)

AROUND = re.compile(
    r"^((self|cross|attn|att|attention|mha|input|to|linear|dense|proj|fc|add|added) )+"
)
"""Words in front of a projection's own in attention: `attn_q`, `proj_out`, `input_to_query`."""

IN_ATTENTION: tuple[tuple[str, Word], ...] = (
    (r"^(c attn|w?qkv|.*qkv.*|in proj|att proj|query key value)$", Word.QKV),
    (r"^w?(q|kv|k|v) a\b|^w?(q|kv) (down|compress)|a proj", Word.LOW_RANK),
    (r"^w?q (b|up)\b", Word.Q_UP),
    (r"^w?kv? (b|up)\b", Word.KV_UP),
    (r"^w?kv\b|key value", Word.KV),
    (r"^(w ?q|q|query|queries|q proj)\b", Word.Q),
    (r"^(w ?k|k|keys?|pos$)\b", Word.K),  # `linear_pos`: keys of relative positions
    (r"to (out|output)$", Word.O),
    (r"^(w ?v|v|values?)\b", Word.V),
    (r"\bgate\b", Word.NONE),
    (r"^(w ?o|o|out|output|dense|proj|projection|c proj|attn vec|linear|post)\b", Word.O),
)
"""Tried on a name without what is `AROUND` it, then on all of the name."""

IN_MLP: tuple[tuple[str, Word], ...] = (
    (r"gate up|up gate|w13\b|wi fused|gate and up|in fused|gate_up", Word.IN_FUSED),
    (r"^(gate|gating|up|wi|w1|w3|fc1|fc in|lin1|c fc|dense h to 4h|intermediate)\b", Word.IN),
    (r"^(w gate|w up|in)\b", Word.IN),
    (r"^(ff|ffn|mlp) ?(in|1|up|gate|proj|layer1)\b|^pwconv ?1$", Word.IN),
    (r"^(down|wo|w2|fc2|fc out|lin2|c proj|dense 4h to h|output|w down|out)\b", Word.OUT),
    (r"^(ff|ffn|mlp) ?(out|2|down|output|layer2)\b|^pwconv ?2$", Word.OUT),
)

CACHE = re.compile(
    r"^((kv|k|v|keys?|values?|attn|attention|self|cross|layer|decoder?) )*cache[sd]?"
    r"( (kv|k|v|keys?|values?|index|pos|\d+))*$|^past (kv|k|keys?|v|values?)( values?)?$"
)
"""Collections and arrays of caches, as one path part; a kernel below it is none of them.

Linen's `cache/attn/cached_key`, `k_cache`, `cache_v`, transformers' `past_key_values`.
"""

ATTENTION_BLOCK = re.compile(r"attn|attention|\bmha\b|\bmla\b")
MLP_BLOCK = re.compile(r"^(mlp|ffn?|feed ?forward|moe|experts?)\b")
EXPERT_BLOCK = re.compile(r"\bexperts?\b|\bmoe\b|\bmixture\b|sparse moe")
SHARED_EXPERT = re.compile(r"shared experts?")
RECURRENT = re.compile(r"^a log$|^time (decay|mix)")
"""Parameters that only recurrent mixers have: state-space models, gated delta nets, RWKV."""
