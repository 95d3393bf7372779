"""The plan's page in a real browser: opened, searched, looked at. Needs chromium and chromedriver.

python -m pytest tests/legs/test_browser.py
"""

import shutil

import jax
import jax.numpy as jnp
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

import jaxtp
from jaxtp.config.presets import preset
from jaxtp.inspect.pages import see_tp_plan
from jaxtp.train.preflight import preflight_config

FLAGS = [
    "--headless=new",
    "--no-sandbox",  # browsers refuse to run as root with one
    "--disable-gpu",
    "--no-first-run",
    "--window-size=1400,1000",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    shape = jax.ShapeDtypeStruct
    layer = {
        "attn": {n: shape((768, 768), jnp.float32) for n in ("q", "k", "v", "o")},
        "mlp": {"up": shape((768, 3072), jnp.float32), "down": shape((3072, 768), jnp.float32)},
    }
    tree = {"embed": shape((50257, 768), jnp.float32), "layers": {str(i): layer for i in range(3)}}
    path = tmp_path_factory.mktemp("page") / "tp_plan.html"
    return see_tp_plan(jaxtp.make_plan(tree, {"tp": 8}, heads=12), path)


def shown(browser):
    rows = browser.find_elements(By.CSS_SELECTOR, "[data-path]")
    return {r.get_attribute("data-path") for r in rows if r.is_displayed()}


def test_the_page_opens_and_puts_fallbacks_first(browser, page):
    browser.get(page.as_uri())
    assert "tp_0=4 x tp_1=2" in browser.title
    headings = [h.text for h in browser.find_elements(By.TAG_NAME, "h2")]
    assert headings[:2] == ["Look here first", "All parameters"]
    first = browser.find_element(By.CSS_SELECTOR, "section [data-path]")
    assert first.get_attribute("data-path") == "embed"  # 154 MB on every device
    assert not [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]


def test_every_block_is_drawn_in_as_many_pieces_as_it_is_cut(browser, page):
    browser.get(page.as_uri())
    pieces = {}
    for row in browser.find_elements(By.CSS_SELECTOR, "[data-path]"):
        drawing = row.find_element(By.TAG_NAME, "svg")
        colours = {r.get_attribute("fill") for r in drawing.find_elements(By.TAG_NAME, "rect")}
        pieces[row.get_attribute("data-path")] = len(colours)
    assert pieces["layers/0/attn/q"] == 4
    assert pieces["layers/0/mlp/up"] == 8
    assert pieces["embed"] == 1


def test_the_search_box_finds_a_folded_layer(browser, page):
    browser.get(page.as_uri())
    everything = shown(browser)
    browser.find_element(By.ID, "search").send_keys("layers/2/mlp")
    assert shown(browser) == {"layers/0/mlp/up", "layers/0/mlp/down"}
    assert browser.find_element(By.ID, "found").text == "2 found"
    browser.find_element(By.ID, "search").clear()
    browser.find_element(By.ID, "search").send_keys(" ")
    assert shown(browser) == everything


def test_a_line_unfolds_its_reasons(browser, page):
    browser.get(page.as_uri())
    row = browser.find_element(By.CSS_SELECTOR, "[data-path='layers/0/attn/q']")
    assert "divides: tp 1, 2, 3, 4, 6, 12" not in row.text
    row.find_element(By.TAG_NAME, "summary").click()
    assert "divides: tp 1, 2, 3, 4, 6, 12" in row.text


def test_it_can_be_looked_at(browser, page, tmp_path):
    browser.get(page.as_uri())
    assert browser.save_screenshot(str(tmp_path / "page.png"))
    assert (tmp_path / "page.png").stat().st_size > 20_000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    sizes = {"mesh.tp": 4, "batch.size": 2, "seq_len": 256, "layers": 2, "optimizer.name": "sgd"}
    plan, report = preflight_config(preset("llama3.2-1b", **sizes))
    path = tmp_path_factory.mktemp("compiled") / "step.html"
    return see_tp_plan(plan, path, report=report), report


def test_a_compiled_step_is_a_heat_map_and_a_timeline(browser, compiled):
    page, report = compiled
    browser.get(page.as_uri())
    headings = [h.text for h in browser.find_elements(By.TAG_NAME, "h2")]
    assert {"The compiled step", "Communication", "Schedule"} <= set(headings)
    cells = browser.find_elements(By.CSS_SELECTOR, "table.heat td")
    coloured = [c for c in cells if c.text]
    sent = sum(float(c.text.replace(",", "")) for c in coloured) * 2**20
    assert sent == pytest.approx(sum(row.wire_bytes for row in report.collectives), rel=0.01)
    most = max(coloured, key=lambda c: float(c.text.replace(",", "")))
    assert most.value_of_css_property("background-color") != "rgba(0, 0, 0, 0)"
    bars = browser.find_elements(By.CSS_SELECTOR, "svg.timeline rect")
    assert len(bars) >= len(report.schedule.work) + len(report.schedule.windows)
    assert all(bar.is_displayed() and bar.size["width"] > 0 for bar in bars[:20])
    assert not [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]


def test_a_bar_says_what_it_is(browser, compiled):
    browser.get(compiled[0].as_uri())
    titles = [
        t.get_attribute("textContent")
        for t in browser.find_elements(By.CSS_SELECTOR, "svg.timeline rect title")
    ]
    assert any("all-reduce" in t and "exposed" in t for t in titles)
    assert browser.save_screenshot(str(compiled[0].with_suffix(".png")))
