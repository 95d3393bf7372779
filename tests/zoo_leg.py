"""Runs models by others against the zoo's expert labels; shared by the `leg_*` programs.

Parameter names are replaced by random ones before the analysis and put back after. The findings
become the plainest plan they allow, which the zoo's own `score.py` judges over the parameters that
the traced call reaches.
"""

# ruff: noqa: T201 (for programs, not for tests)
import argparse
import importlib.util
import json
import math
import pathlib
import random
import time

from jaxtp.rules.graph import analyse

TP = (2, 4, 8)


def scrambled(call, params, seed=0):
    """The same call on randomly named parameters, and the names they had."""
    draw = random.Random(seed)
    names = {f"{draw.getrandbits(64):016x}": path for path in params}
    return lambda flat, *x: call({names[key]: leaf for key, leaf in flat.items()}, *x), names


def plan_at(findings, shapes, tp):
    """The plainest plan that findings allow: each class as many ways as divide it, major first."""
    axes = [f"tp_{i}" for i in range(int(math.log2(tp)))]
    specs = {}
    for path, shape in shapes.items():
        spec, finding = [[] for _ in shape], findings[path]
        if finding.dim is not None and not finding.pieces:
            ways = 1
            for size in finding.units:
                take = math.gcd(size, tp // ways)
                ways *= take
                if take != size:
                    break
            spec[finding.dim] = axes[: int(math.log2(ways))]
        specs[path] = {"spec": spec, "reordered": False}
    return {"mesh": dict.fromkeys(axes, 2), "params": specs}


def check(score, tree, name, call, params, inputs, show):
    """Analyses one model and prints one line; returns whether the experts agree."""
    shapes = {path: list(leaf.shape) for path, leaf in params.items()}
    if shapes != tree["params"]:
        differ = set(map(str, shapes.items())) ^ set(map(str, tree["params"].items()))
        raise SystemExit(f"{name}: built shapes are not the zoo's: {sorted(differ)}")
    hidden, names = scrambled(call, params)
    start = time.perf_counter()
    found = analyse(hidden, {key: params[path] for key, path in names.items()}, *inputs)
    seconds = time.perf_counter() - start
    findings = {names[key]: finding for key, finding in found.findings.items()}
    reached = {
        "name": name,
        "params": {path: shapes[path] for path in findings},
        "expected": {path: tree["expected"][path] for path in findings},
    }
    rows = [score.score_tree(reached, plan_at(findings, reached["params"], tp), tp) for tp in TP]
    opaque = sorted({entry.primitive for entry in found.opaque})
    scores = (
        f"tp{row_tp} ok {row['ok']:6.1%} agree {row['agree_share']:6.1%}"
        for row_tp, row in zip(TP, rows, strict=True)
    )
    print(
        f"{name:22s} reached {len(findings)}/{len(params)}",
        *scores,
        f"{seconds:.2f} s",
        *opaque,
        sep="  ",
        flush=True,
    )
    for path in sorted({p for row in rows for _, p, *_ in row["worst"]}) if show else ():
        print("   ", path, shapes[path], "expected", tree["expected"][path])
        print("        got", findings[path])
    return all(row["ok"] == 1 for row in rows)


def run(doc, prefix, models, build):
    """The command line of a leg: `ZOO [NAME ...] [--show]`; exit status 1 if a model disagrees."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("zoo", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--show", action="store_true", help="print disagreements with reasons")
    args = parser.parse_args()
    loader = importlib.util.spec_from_file_location("score", args.zoo / "score.py")
    score = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(score)
    right = True
    for name in args.names or models:
        tree = json.loads((args.zoo / "trees" / f"{prefix}{name}.json").read_text())
        right &= check(score, tree, name, *build(name, tree["config"]), args.show)
    return 0 if right else 1
