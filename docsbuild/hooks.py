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
    config.nav[-1] = {"Examples": ["gallery/index.md", *pages, {"A package to copy": "gallery/skeleton.md"}]}
    return config


def on_files(files: Files, config: Any) -> Files:
    for name in OUTSIDE:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "reference/commands.md", content=commands.page()))
    files.append(File.generated(config, "gallery/skeleton.md", content=_skeleton(ROOT / "examples" / "skeleton")))
    for name, content in gallery.made(ROOT / "examples", ROOT / "build" / "gallery").items():
        files.append(File.generated(config, f"gallery/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of the documentation, such as ../SECURITY.md, lead to what the site has of them."""
    depth = "../" * page.file.src_uri.count("/")
    for name in OUTSIDE:
        markdown = markdown.replace(f"](../{depth}{name})", f"]({depth}{name})")
    return markdown.replace("](../examples/skeleton)", "](gallery/skeleton.md)")


def _skeleton(folder: Path) -> str:
    about = "A bilevel method of your own as a package: copy the folder `examples/skeleton` of the repository."
    parts = [
        f"## {name}\n\n```{kind}\n{(folder / name).read_text(encoding='utf-8')}```\n"
        for name, kind in (("heavyball.py", "python"), ("pyproject.toml", "toml"))
    ]
    return "\n".join(
        [f"# A package to copy\n\n{about} [Add an algorithm](../add-an-algorithm.md) explains it.\n", *parts]
    )


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    def formula(match: re.Match[str]) -> str:
        latex = html.unescape(match["latex"]).strip()
        return str(convert(latex[2:-2], display="block" if latex.startswith(r"\[") else "inline"))

    return re.sub(r'<(span|div) class="arithmatex">(?P<latex>.*?)</\1>', formula, content, flags=re.S)
