"""Every optimizer that must work on a small hand-planned tree; a new one joins by adding a row."""

import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from optax import contrib

SHAPES = {
    "embed": {"table": (16, 8)},
    "layers": {
        "down": {"kernel": (2, 16, 8)},
        "up": {"bias": (2, 16), "kernel": (2, 8, 16)},
    },
    "norm": {"scale": (8,)},
    "square": {"kernel": (8, 8)},
}
SPECS = {
    "embed/table": P("tp"),
    "layers/down/kernel": P(None, "tp"),
    "layers/up/bias": P(None, "tp"),
    "layers/up/kernel": P(None, None, "tp"),
    "norm/scale": P(),
    "square/kernel": P(None, "tp"),
}
MATRICES = {
    "embed": {"table": True},
    "layers": {"down": {"kernel": True}, "up": {"bias": False, "kernel": True}},
    "norm": {"scale": False},
    "square": {"kernel": True},
}
LABELS = {
    "embed": {"table": "frozen"},
    "layers": {"down": {"kernel": "adam"}, "up": {"bias": "sgd", "kernel": "adam"}},
    "norm": {"scale": "sgd"},
    "square": {"kernel": "adam"},
}

OPTIMIZERS = {
    "adamw_clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "sgd_momentum": optax.sgd(1e-2, momentum=0.9),
    "lion": optax.lion(1e-2),
    "sm3": optax.sm3(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": contrib.muon(1e-2),
    "masked": optax.masked(optax.adam(1e-2), MATRICES),
    "multi_transform": optax.multi_transform(
        {
            "adam": optax.adam(1e-2),
            "sgd": optax.sgd(1e-2, momentum=0.9),
            "frozen": optax.set_to_zero(),
        },
        LABELS,
    ),
    "multi_steps": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(optax.constant_schedule(1e-2)),
    "schedule_free": contrib.schedule_free_adamw(1e-2),
    "lamb": optax.lamb(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "lbfgs": optax.lbfgs(1e-2, memory_size=3, linesearch=None),
    "prodigy": contrib.prodigy(1.0),
    "adan": optax.adan(1e-2),
    "stateless": optax.sgd(1e-2),
}


def fresh_params():
    """The tree of `SHAPES`, newly drawn, on the host."""
    random = np.random.default_rng(0)

    def draw(shapes):
        if isinstance(shapes, dict):
            return {name: draw(inner) for name, inner in shapes.items()}
        return random.normal(0.0, 0.5, shapes).astype(np.float32)

    return draw(SHAPES)
