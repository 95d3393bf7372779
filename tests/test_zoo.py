"""Real trees of models that others wrote, scored against expert labels."""

import importlib.util
from pathlib import Path

import pytest

import jaxtp
from jaxtp.plan.specs import spec_text

FOLDER = Path(__file__).parent / "data" / "zoo"
TREES = sorted(FOLDER.glob("*.json"))
TENSOR_SIZES = (2, 4, 8)


def load_script(name):
    path = Path(__file__).parent.parent / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_script("bench_plan")


@pytest.mark.parametrize("use_config", [True, False], ids=["sizes", "no-sizes"])
@pytest.mark.parametrize("tp", TENSOR_SIZES)
@pytest.mark.parametrize("path", TREES, ids=lambda p: p.stem)
def test_no_tree_is_under_90_percent_and_nothing_is_harmful(path, tp, use_config):
    score = bench.score(path, tp, use_config=use_config)
    assert score.counts["harmful"] == 0, score.notes
    assert score.ok >= 0.9, score.notes


@pytest.mark.parametrize("use_config", [True, False], ids=["sizes", "no-sizes"])
@pytest.mark.parametrize("tp", TENSOR_SIZES)
def test_all_trees_together(tp, use_config):
    scores = [bench.score(path, tp, use_config=use_config) for path in TREES]
    total = bench.total(scores)
    notes = [note for score in scores for note in score.notes]
    assert total.ok >= 0.97, notes
    assert total.ok_bytes >= 0.99, notes


def verdict(spec, label, *, shape=(64, 64), mesh=None, siblings=()):
    """The verdict on one array, its decision written by hand."""
    mesh = mesh or {"tp": 4}
    decision = jaxtp.ParamDecision(
        path="w", shape=shape, dtype="float32", spec=spec, role="", reasons=("by hand",)
    )
    return bench.verdict(decision, label, set(siblings), mesh)


COLUMN = {"dim": 1, "units": 8, "group": "attn"}
SPLIT, WHOLE, OTHER = ((), ("tp",)), ((), ()), (("tp",), ())


@pytest.mark.parametrize(
    ("spec", "label", "want"),
    [
        (SPLIT, COLUMN, "agree"),
        (WHOLE, COLUMN, "missed"),
        (OTHER, COLUMN, "wrong"),
        (SPLIT, {"dim": None}, "wrong"),
        (WHOLE, {"dim": None}, "agree"),
        (WHOLE, COLUMN | {"soft": True}, "acceptable"),
        (WHOLE, COLUMN | {"alternatives": [{"dim": None}]}, "acceptable"),
        (OTHER, COLUMN | {"alternatives": [{"dim": 0}]}, "acceptable"),
        (SPLIT, COLUMN | {"layout": "fused qkv, contiguous"}, "wrong"),
        (WHOLE, COLUMN | {"layout": "fused qkv, contiguous"}, "acceptable"),
        (SPLIT, COLUMN | {"units": 6}, "harmful"),
        (WHOLE, COLUMN | {"units": 3}, "agree"),
        ((("tp",), ("tp",)), COLUMN, "wrong"),
    ],
)
def test_verdicts(spec, label, want):
    assert verdict(spec, label) == want


def test_verdicts_on_narrow_splits():
    factored = {"tp_0": 2, "tp_1": 2}
    half = ((), ("tp_0",))
    assert verdict(half, COLUMN, mesh=factored) == "acceptable"
    assert verdict(half, COLUMN | {"units": 6}, mesh=factored) == "agree"
    # Query heads may be as narrow as the 2 kv heads of their group.
    assert verdict(half, COLUMN, mesh=factored, siblings=[2]) == "agree"
    assert verdict(SPLIT, COLUMN, shape=(64, 66)) == "harmful"


def test_the_table_and_the_json_say_the_same(capsys):
    options = bench.Options(trees=FOLDER, tp=8, as_json=True)
    bench.main(options)
    rows = bench.json.loads(capsys.readouterr().out)["agreement"]
    assert len(rows) == 2 * len(TREES)
    bench.main(bench.Options(trees=FOLDER, tp=8))
    table = capsys.readouterr().out
    for row in rows:
        assert "/".join(str(n) for n in row["counts"].values()) in table


def test_a_plan_read_from_a_deep_program_is_quick():
    scanned, shallow, deep = bench.trace_rows(depths=(4, 16))
    assert scanned["seconds"] < 3
    assert deep["equations"] > 3.5 * shallow["equations"]
    assert deep["seconds"] < 20 * 16 / 126


def test_labels_are_about_the_trees():
    for path in TREES:
        tree, _ = jaxtp.load_tree(path)
        labels = bench.json.loads(path.read_text())["expected"]
        assert set(labels) == set(tree)
        for name, label in labels.items():
            if label["dim"] is not None:
                assert tree[name].shape[label["dim"]] % label["units"] == 0, (path.stem, name)


def test_expert_choices_are_visible_in_the_plan():
    tree, config = jaxtp.load_tree(FOLDER / "easydel_gpt_oss.json")
    plan = jaxtp.make_plan(tree, {"tp": 8}, config=config)
    assert spec_text(plan["model/layers/0/self_attn/sinks"].spec) == "P(tp)"
    assert spec_text(plan["model/layers/0/mlp/experts/down_proj/bias"].spec) == "P(tp, -)"
