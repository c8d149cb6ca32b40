"""The site builds without a warning, is sound HTML, and serves people with a keyboard, a phone and no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlparse

import pytest
from filelock import FileLock

from docsbuild import gallery
from tests.quicker import plain

ROOT = Path(__file__).parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("mkdocs", "material", "mkdocstrings", "latex2mathml"))),
    reason="the site's tools are not installed: pip install 'fedbilevel[docs]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory, worker_id):
    """Built once, for all workers of the test run."""
    home = tmp_path_factory.getbasetemp()
    folder = (home if worker_id == "master" else home.parent) / "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "index.html").exists():
            build(folder)
    return folder


def build(folder):
    environment = plain()
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


class Page(HTMLParser):
    """Links, names to link to, headings of the article, and images without a text, of one file."""

    def __init__(self, file):
        super().__init__()
        self.links, self.names, self.headings, self.mute = [], set(), [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.names |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links += [found[name] for name in ("href", "src") if found.get(name)]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "img" and not found.get("alt"):
            self.mute.append(found.get("src"))


def test_links_headings_and_images(site):
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    assert len(pages) > 60
    wrong = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlparse(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            names = pages[target].names if target in pages else {unquote(parts.fragment)}
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in names):
                wrong.append((file.name, link))
        if page.headings.count(1) != 1:
            wrong.append((file.name, "headings of the first level", page.headings.count(1)))
        wrong += [(file.name, "an image without a text", source) for source in page.mute]
    assert wrong == []


def test_every_example_is_short_and_shown(site):
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert len(scripts) >= 10
    for script in scripts:
        assert len(script.read_text(encoding="utf-8").splitlines()) < 60, f"{script.name} has 60 lines or more"
        shown = (site / "gallery" / f"{script.stem}.html").read_text(encoding="utf-8")
        assert f'src="{script.stem}-1.png"' in shown, f"{script.name} draws nothing"


def test_a_long_example_stops_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "LONGEST", 0)
    script = tmp_path / "long.py"
    script.write_text("# %%\nsum(range(100_000))\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"long\.py takes 0 s of processor time"):
        gallery.execute(script, tmp_path / "place")
    assert not (tmp_path / "place" / "cells.json").exists()


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None or DRIVER is None:
        pytest.skip("no Chromium with its driver is installed (Debian: chromium, chromium-driver)")
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(site):
    """The site on a loopback address: browsers start no workers, and so no search, from files."""
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *arguments: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def show(browser, address, page, width):
    from selenium.webdriver.support.wait import WebDriverWait

    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(address + page)
    WebDriverWait(browser, 60).until(lambda one: one.execute_script("return document.readyState") == "complete")


def violations(browser):
    """What axe-core finds on the page as it stands."""
    package = find_spec("axe_core_python")
    if package is None:
        pytest.skip("axe-core-python is not installed")
    browser.execute_script((Path(package.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    ask = "const done = arguments[1]; axe.run(document, arguments[0]).then(done, error => done(String(error)))"
    found = browser.execute_async_script(ask, rules)
    assert isinstance(found, dict), found
    return [(one["id"], [node["html"][:160] for node in one["nodes"][:5]]) for one in found["violations"]]


PAGES = pytest.mark.parametrize(
    "page",
    [
        "index.html", "reference/algorithms.html", "gallery/02_bilevel_picture.html", "tutorials/tune.html",
        "results/tuning.html", "table1.html", "how-to/operate-a-site.html",
    ],
)  # fmt: skip
WIDTHS = pytest.mark.parametrize("width", [1280, 400])
WIDER = "return document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"


@PAGES
@WIDTHS
def test_pages_are_accessible_and_ask_nobody(browser, address, page, width):
    show(browser, address, page, width)
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {one["params"]["request"]["url"] for one in asked if one["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith((address, "data:", "blob:", "chrome", "about:"))} == set()
    assert browser.execute_script(WIDER) <= 0
    assert violations(browser) == []


@WIDTHS
def test_search_finds_a_function(browser, address, width):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    show(browser, address, "index.html", width)
    if width < 700:  # the field is behind a button
        browser.execute_script("document.querySelector('.md-header label[for=__search]').click()")
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    browser.execute_script("arguments[0].focus()", field)
    WebDriverWait(browser, 60).until(lambda one: field.is_displayed())
    field.send_keys("conjugate_gradient")
    links = ".md-search-result__link"
    WebDriverWait(browser, 60).until(lambda one: one.find_elements(By.CSS_SELECTOR, links))
    found = [one.get_attribute("href") for one in browser.find_elements(By.CSS_SELECTOR, links)]
    assert any("reference/hypergradients.html" in link for link in found), found[:10]
    assert browser.execute_script(WIDER) <= 0
    assert violations(browser) == []
