"""The page in real headless Chromium: drawn without errors, usable with a keyboard, on a phone, in the dark."""

from __future__ import annotations

import json
import re
import shutil
from xml.etree import ElementTree

import pytest

from fedbilevel.report.page import write_report
from tests.report.folders import METHODS, bench, fairness, fit, rates, table1

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (Debian: chromium)"),
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver is installed (Debian: chromium-driver)"),
]
EVIL = "<script>document.title = 'taken'</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    downloads = tmp_path_factory.mktemp("downloads")
    several = {"profile.default_content_setting_values.automatic_downloads": 1}
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads), **several})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.downloads = downloads
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    few = {name: METHODS[name] for name in ("FedAvg", "FedReg", "FedMinMax", "FedBiO", "FedBiOAcc, cells")}
    runs = {
        "table1": table1(home / "table1", seeds=3, methods=few),
        "fit": fit(home / "fit", name=EVIL, group_names=(EVIL, "m"), methods=("FedAvg", EVIL)),
        "bench": bench(home / "bench"),
        "rates": rates(home / "rates"),
        "fairness": fairness(home / "fairness"),
    }
    return {name: write_report(run)[0] for name, run in runs.items()}


def visit(browser, page):
    """Open a page and wait until it is read: the driver's own waiting may end too early on a busy machine."""
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get("about:blank")
    browser.get(page.as_uri())
    there = "return location.href === arguments[0] && document.readyState === 'complete'"
    WebDriverWait(browser, 60).until(lambda one: one.execute_script(there, page.as_uri()))


@pytest.fixture
def show(browser, pages):
    """Open a page in a window of the given width, with the wanted colour scheme."""

    def opened(name="table1", width=1280, scheme="light"):
        command = browser.execute_cdp_cmd
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
        command("Emulation.setDeviceMetricsOverride", metrics)
        command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        visit(browser, pages[name])
        browser.execute_script("try { localStorage.clear() } catch {}")
        visit(browser, pages[name])
        return browser

    return opened


def call(browser, script, *arguments):
    return browser.execute_script(script, *arguments)


def click(browser, selector):
    call(browser, "document.querySelector(arguments[0]).click()", selector)


@pytest.mark.parametrize("name", ["table1", "fit", "bench", "rates", "fairness"])
def test_no_errors_and_no_requests(show, name):
    browser = show(name)
    assert browser.get_log("browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {one["params"]["request"]["url"] for one in asked if one["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith(("file:", "data:"))} == set()
    assert browser.title != "taken"
    # Everything drawn lies inside its picture.
    outside = call(
        browser,
        """
        const bad = [];
        for (const svg of document.querySelectorAll('.panel:not([hidden]) svg')) {
          const frame = svg.getBoundingClientRect(), slack = 2;
          if (frame.width < 200 || frame.height < 60) bad.push(['small', svg.getAttribute('aria-label')]);
          for (const one of svg.querySelectorAll('text, .glyph, .bar, .line')) {
            if (one.closest('[style*="none"]') || one.closest('[data-layer]')) continue;
            const box = one.getBoundingClientRect(), out = [frame.left - box.left, box.right - frame.right, frame.top - box.top,
              box.bottom - frame.bottom];
            if (Math.max(...out) > slack) bad.push([one.tagName, one.textContent, ...out]);
          }
          if (!svg.querySelectorAll('.mark .glyph').length) bad.push(['empty', svg.getAttribute('aria-label')]);
        }
        return bad;""",
    )
    assert outside == []


def test_axes_say_what_they_show(show):
    browser = show()
    labels = call(
        browser,
        """return [...document.querySelectorAll('figure')].map(one => {
          const svg = one.querySelector('.panel:not([hidden]) svg');
          const text = (name) => svg.querySelector(name)?.textContent ?? '';
          return [one.dataset.chart, text('.label.x'), text('.label.y'), svg.querySelectorAll('.ticks.x text').length]})""",
    )
    assert [tuple(one[:3]) for one in labels] == [
        ("plane", "test equal-opportunity gap (left is fairer)", "test accuracy"),
        ("differences", "test equal-opportunity gap minus FedAvg's (lower is better)", ""),
        ("rates", "true-positive rate on test rows", ""),
        ("weights", "weight (1 is neutral)", ""),
        ("convergence", "rounds", "test accuracy"),
        ("costs", "bytes up and down a run", ""),
    ]
    assert all(one[3] >= 3 for one in labels)
    click(browser, "[data-chart=convergence] input[value=bytes]")
    label = call(
        browser, "return document.querySelector('[data-chart=convergence] .panel:not([hidden]) .label.x').textContent"
    )
    assert label == "bytes, up and down, all clients"


STATE = """
  const read = (one) => ['d', 'x', 'y', 'transform', 'viewBox'].map(name => one.getAttribute(name)).join('|') + one.textContent;
  return [...document.querySelectorAll('.panel:not([hidden]) svg')].map(svg =>
    [svg, ...svg.querySelectorAll('.mark:not([data-layer]) *, .group, .ticks text, .grid, .frame')].map(one =>
      one === svg ? svg.getAttribute('viewBox') : read(one)));"""


@pytest.mark.parametrize("name", ["table1", "bench"])
def test_the_script_draws_what_python_drew(show, browser, pages, name):
    """Static pictures, and those drawn again by the script, are the same to a tenth of a unit."""
    show(name)
    again = call(browser, STATE)
    # The same page with its script taken out: what the file itself holds.
    text = re.sub(r"<script>.*?</script>", "", pages[name].read_text(), flags=re.S)
    bare = pages[name].with_name("bare.html")
    bare.write_text(text)
    shown = call(browser, "return [...document.querySelectorAll('.panel')].map(one => !one.hidden)")
    visit(browser, bare)
    call(browser, "document.querySelectorAll('.panel').forEach((one, n) => { one.hidden = !arguments[0][n] })", shown)
    static = call(browser, STATE)
    assert len(static) == len(again) == sum(shown)
    number = re.compile(r"-?\d+\.?\d*")
    for ours, theirs in zip(static, again, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert number.sub("#", one) == number.sub("#", other)
            for a, b in zip(number.findall(one), number.findall(other), strict=True):
                assert abs(float(a) - float(b)) <= 0.11, (one, other)


def test_filter_acts_on_table_and_figures(show):
    browser = show()
    visible = (
        """return [...document.querySelectorAll(arguments[0])].filter(one => one.getClientRects().length).length"""
    )
    count = lambda selector: call(browser, visible, selector)  # noqa: E731
    rows = "#results > .scroll .results tbody tr[data-series]"
    assert (count(rows), count("#plane .panel")) == (20, 4)
    before = call(browser, "return document.querySelector('#plane .ticks.x').textContent")
    click(browser, ".filters input[value=credit]")
    assert (count(rows), count("#plane .panel"), count("#costs tr[data-series]")) == (10, 2, 10)
    click(browser, '.filters input[data-filter-series="2"]')
    assert count(rows) == 8
    assert count("#plane .panel:first-child .mark") == 4
    after = call(browser, "return document.querySelector('#plane .ticks.x').textContent")
    assert after != before  # the axes follow: FedMinMax was far out
    assert call(browser, "return document.getElementById('said').textContent") == "Showing 2 of 4 cases, 4 of 5 series."
    # A legend acts on its own figure only.
    click(browser, '#plane [data-legend="0"]')
    assert count("#plane .panel:first-child .mark") == 3
    assert count("#rates .panel:first-child .mark") == 5 * 4
    click(browser, "#plane [data-layer=paper]")
    assert count("#plane .panel:first-child .mark") > 3
    click(browser, ".filters [type=reset]")
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert (count(rows), count("#plane .panel")) == (20, 4)
    for value in ("adult", "credit"):
        click(browser, f".filters input[value={value}]")
    assert count("#plane .empty") == 1


def test_a_filter_zooms_and_ticks_stay_true(show):
    """Where marks and ticks stand after a filter, and what the marks' tips say, are the same numbers."""
    browser = show()
    click(browser, '.filters input[data-filter-series="2"]')
    for layer in ("", "seeds", "paper"):
        if layer:
            click(browser, f"#plane [data-layer={layer}]")
        panels = call(
            browser,
            """return [...document.querySelectorAll('#plane .panel:not([hidden])')].map(panel => {
              const { tips } = JSON.parse(panel.querySelector('script').textContent);
              const marks = [...panel.querySelectorAll('.mark')];
              const ticks = [...panel.querySelectorAll('.ticks.x text')].map(one => [+one.getAttribute('x'), +one.textContent]);
              const seen = marks.map((one, n) => [one, tips[n]]).filter(([one]) => one.getClientRects().length);
              return [ticks, seen.map(([one, tip]) => { const glyph = one.querySelector('use, circle');
                return [+(glyph.getAttribute('x') ?? glyph.getAttribute('cx')), tip]; })] })""",
        )
        assert len(panels) == 4
        for ticks, marks in panels:
            assert 3 <= len(ticks) <= 8
            (x0, v0), (x1, v1) = ticks[0], ticks[-1]
            for x, tip in marks:
                value = float(re.findall(r"\.\d{4}", re.sub(r" \[[^]]*\]", "", tip))[1])
                assert abs(v0 + (x - x0) / (x1 - x0) * (v1 - v0) - value) <= 0.002 * abs(v1 - v0) + 1e-4, tip


@pytest.mark.parametrize("name", ["table1", "fit", "bench", "rates", "fairness"])
@pytest.mark.parametrize("width", [360, 820])
def test_narrow_screens_do_not_scroll_sideways(show, name, width):
    browser = show(name, width)
    call(browser, "document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert call(browser, "return document.documentElement.scrollWidth") <= width
    smallest = call(
        browser,
        """return Math.min(...[...document.querySelectorAll('.panel:not([hidden]) svg text')].map(one =>
          parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().d || 99))""",
    )
    assert smallest >= 8.5 if width > 700 else smallest >= 10


CONTRAST = """
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => { const f = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    return .2126 * f(r) + .7152 * f(g) + .0722 * f(b); };
  const ground = (one) => { for (; one; one = one.parentElement) { const c = parse(getComputedStyle(one).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
  const bad = [];
  let seen = 0;
  for (const one of document.querySelectorAll('body *')) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.getClientRects().length || one.closest('script, .hidden')) continue;
    const style = getComputedStyle(one), text = parse(one instanceof SVGElement ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(text), light(ground(one))].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    seen++;
    if (ratio < 4.5) bad.push([one.tagName, one.className?.baseVal ?? one.className, one.textContent.slice(0, 30), ratio]);
  }
  return [seen, bad];"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_all_text(show, scheme):
    browser = show("table1", scheme=scheme)
    call(browser, "document.querySelectorAll('details').forEach(one => { one.open = true })")
    click(browser, ".filters input")
    click(browser, "#plane [data-legend]")
    seen, bad = call(browser, CONTRAST)
    assert seen > 500
    assert bad == []


def test_dark_switch(show, pages):
    browser = show("fit")
    ground = "return getComputedStyle(document.body).backgroundColor"
    bright = call(browser, ground)
    theme = browser.find_element("id", "theme")
    assert theme.get_attribute("aria-checked") == "false"
    theme.click()
    assert theme.get_attribute("aria-checked") == "true"
    dark = call(browser, ground)
    assert dark != bright
    visit(browser, pages["fit"])
    assert call(browser, ground) == dark  # it is remembered
    browser.find_element("id", "theme").click()
    assert call(browser, ground) == bright
    browser = show("fit", scheme="dark")
    assert call(browser, ground) == dark
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]},
    )
    assert call(browser, ground) == "rgb(255, 255, 255)"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_keyboard_reaches_controls_and_values(show):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser = show("fit")
    reached, panel = [], None
    for _ in range(100):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        told = call(
            browser,
            """const one = document.activeElement, box = (one.closest('label') ?? one).getBoundingClientRect();
            const ring = [one, one.nextElementSibling].some(e => e && parseFloat(getComputedStyle(e).outlineWidth) >= 2
              && getComputedStyle(e).outlineStyle !== 'none');
            return [one.tagName, one.id, one.className, one.dataset?.save ?? '', ring && box.width > 0]""",
        )
        if told[0] == "BODY":  # the end of the page
            break
        reached.append(tuple(told[:4]))
        assert told[4], told
        if told[2] == "panel" and panel is None:
            panel = told
            ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
            first = call(browser, "return document.getElementById('said').textContent")
            assert re.match(r".*: test accuracy \.\d{4} \[.*, test equal-opportunity gap \.\d{4} \[", first)
            assert call(browser, "return document.getElementById('tip').textContent") == first
            ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
            assert call(browser, "return document.getElementById('said').textContent") != first
            ActionChains(browser).send_keys(Keys.ESCAPE).perform()
            assert call(browser, "return document.getElementById('tip').hidden")
    assert panel is not None
    assert reached[0][2] == "skip"
    assert {"theme"} <= {one[1] for one in reached}
    assert {"svg", "png"} <= {one[3] for one in reached}
    assert {"A", "INPUT", "BUTTON", "SUMMARY"} <= {one[0] for one in reached}


def test_hover_tells_the_value(show):
    from selenium.webdriver.common.action_chains import ActionChains

    browser = show("bench")
    glyph = browser.find_element("css selector", "#plane .panel .mark .glyph")
    call(browser, "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", glyph)
    ActionChains(browser).move_to_element(glyph).perform()
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed()
    assert re.search(r"score 0\.\d+ \[.*bytes", tip.text)


def test_figures_can_be_saved(show):
    browser = show("bench")
    for kind in ("svg", "png"):
        click(browser, f"[data-chart=convergence] [data-save={kind}]")
    done = """const [folder, then] = arguments; setTimeout(then, 300)"""
    for _ in range(40):
        browser.execute_async_script(done, "")
        if {"convergence.svg", "convergence.png"} <= {path.name for path in browser.downloads.iterdir()}:
            break
    text = (browser.downloads / "convergence.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "var(" not in text
    assert len(root.findall("{*}svg")) == 3
    assert len(root.findall(".//{*}path[@class='line']")) == 3 * 5
    picture = (browser.downloads / "convergence.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[place : place + 4], "big") for place in (16, 20))
    assert (width, height) == tuple(3 * round(float(root.get(name))) for name in ("width", "height"))
