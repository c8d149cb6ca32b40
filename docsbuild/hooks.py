"""What MkDocs does not do by itself: pages from the repository's own files, commands and examples; formulas as MathML.

Formulas become MathML while the site is built, so that the site loads no script from elsewhere.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from docsbuild import commands, gallery  # noqa: E402  (found through the path above)

OUTSIDE = ("CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")
"""Pages at the root of the repository, where hosts look for them."""


def on_config(config: Any) -> Any:
    """One entry of the navigation for every example."""
    pages: list[Any] = [{title: f"gallery/{name}.md"} for name, title in gallery.titles(ROOT / "examples").items()]
    config.nav[-1] = {"Examples": ["gallery/index.md", *pages]}
    return config


def on_files(files: Files, config: Any) -> Files:
    for name in OUTSIDE:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "reference/commands.md", content=commands.page()))
    for name, content in gallery.made(ROOT / "examples", ROOT / "build" / "gallery").items():
        files.append(File.generated(config, f"gallery/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of the documentation, such as ../SECURITY.md and ../../examples, lead to what the site has of them."""
    depth = "../" * page.file.src_uri.count("/")
    for name in OUTSIDE:
        markdown = markdown.replace(f"](../{depth}{name})", f"]({depth}{name})")
    return markdown


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    def formula(match: re.Match[str]) -> str:
        latex = html.unescape(match["latex"]).strip()
        return str(convert(latex[2:-2], display="block" if latex.startswith(r"\[") else "inline"))

    content = re.sub(r'<(span|div) class="arithmatex">(?P<latex>.*?)</\1>', formula, content, flags=re.S)
    # What scrolls must be reachable with a keyboard.
    return re.sub(r"(<pre>(?:<span></span>)?)<code>", r'\1<code tabindex="0">', content)
