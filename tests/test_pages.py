"""The page of a plan as text; `legs/test_browser.py` opens it in a browser."""

import jax
import jax.numpy as jnp

import jaxtp
from jaxtp.inspect import pages
from jaxtp.inspect.pages import Node, Section, page, see_tp_plan, to_html


def tree(layers=2):
    shape = jax.ShapeDtypeStruct
    return {
        f"layer_{i}": {"up": shape((64, 256), jnp.float32), "down": shape((256, 64), jnp.float32)}
        for i in range(layers)
    }


def test_the_page_stands_alone_and_names_every_reason(tmp_path):
    plan = jaxtp.make_plan(tree(), {"tp": 8})
    path = see_tp_plan(plan, tmp_path / "plan.html")
    text = path.read_text()
    assert "http" not in text.replace("http://www.w3.org", "")
    for d in plan.decisions[:2]:
        assert d.reasons[-1] in text


def test_it_plans_by_itself(tmp_path):
    text = see_tp_plan(tree(), tmp_path / "plan.html", mesh={"tp": 4}).read_text()
    assert "tensor-parallel plan, tp=4" in text


def test_text_from_a_model_is_escaped():
    text = to_html(Node("<script>", path='a"b'))
    assert text == '<li data-path="a&quot;b"><span class="plain">&lt;script&gt;</span></li>'
    assert "<b>" not in page("<b>", [Section("<b>", "<b>")])


def test_repeated_layers_are_one_line_so_that_deep_models_stay_small(tmp_path):
    plans = [jaxtp.make_plan(tree(n), {"tp": 8}) for n in (2, 200)]
    sizes = [len(see_tp_plan(p, tmp_path / "p.html").read_text()) for p in plans]
    assert sizes[1] < sizes[0] + 100


def test_drawings_cut_along_the_split_dim():
    plan = jaxtp.make_plan(tree(), {"tp": 4})
    up = pages.draw(plan["layer_0/up"], plan.mesh, 100, 50)
    down = pages.draw(plan["layer_0/down"], plan.mesh, 100, 50)
    assert 'x="25.00" y="0.00" width="25.00" height="50.00"' in up
    assert 'x="0.00" y="12.50" width="100.00" height="12.50"' in down
    assert up.count("<rect") == down.count("<rect") == 4
