"""MkDocs hooks: pages from outside docs/, links between them, and the public API's pages.

A document may link to any file of the repository, as it does where GitHub shows it. MkDocs knows
docs/ alone, so these hooks add each linked file to the site, follow the links of added Markdown
files, and rewrite links from paths in the repository to paths in the site. README.md is the home
page.
"""

from __future__ import annotations

import importlib
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from octavo.server.cli.api_reference import MODULES, public_names

ROOT = Path(__file__).resolve().parents[1]
HOME = "README.md"
SIMULATION = "octavo.engine.simulation.simulate"
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)([^)\s]*\))")
_EXTERNAL = re.compile(r"[a-z]+:|/")
_FENCE = re.compile(r"^ *(```|~~~)")
_ITEM = re.compile(r"^ *([-*+]|1\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the home page, the API's pages and, one after the other, files that pages link to."""
    for name, text in api_pages().items():
        files.append(File.generated(config, name, content=text))
    added = {HOME}
    pages = [HOME]
    pages += [
        f"docs/{file.src_uri}" for file in files if file.abs_src_path and is_page(file.src_uri)
    ]
    for page in pages:  # grows as it goes
        linked = links(page, (ROOT / page).read_text("utf-8"))
        new = {path for path in linked if not path.startswith("docs/")} - added
        pages += sorted(filter(is_page, new))
        added |= new
    for path in sorted(added):
        files.append(File.generated(config, site_uri(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links and sets lists apart, so that a page reads as it does on GitHub."""
    source = page.file.abs_src_path
    if source is not None:
        markdown = in_site(Path(source).relative_to(ROOT).as_posix(), markdown)
    return with_lists_apart(markdown)


def api_pages() -> dict[str, str]:
    """A page for each public module, by its path in the site; a class is described once."""
    pages, shown = {}, set()
    for name in MODULES:
        module = importlib.import_module(name)
        lines = [f"# {name}", ""]
        for public in sorted(public_names(module), key=str.lower):
            if (item := getattr(module, public)) not in shown:
                lines += [f"::: {name}.{public}", ""]
            shown.add(item)
        pages[f"reference/{name}.md"] = "\n".join(lines)
    names = ("simulate", "SimulationOptions", "SimulationReport")
    simulation = [f"# {SIMULATION}", *(f"::: {SIMULATION}.{name}" for name in names)]
    pages[f"reference/{SIMULATION}.md"] = "\n\n".join(simulation)
    return pages


def is_page(path: str) -> bool:
    return path.endswith(".md")


def repository_path(page: str, target: str) -> str | None:
    """The path in the repository that a page's link names, or None if it is no file there."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def links(page: str, markdown: str) -> set[str]:
    """Files of the repository that a page links to."""
    targets = (match[2] for match in _LINK.finditer(markdown) if not _EXTERNAL.match(match[2]))
    return {path for target in targets if (path := repository_path(page, target))}


def site_uri(path: str) -> str:
    """Where a file of the repository stands in the site's sources."""
    return "index.md" if path == HOME else path.removeprefix("docs/")


def in_site(page: str, markdown: str) -> str:
    """A page with its links as they are in the site; MkDocs reports those that lead nowhere."""
    here = posixpath.dirname(site_uri(page)) or "."

    def replace(match: re.Match[str]) -> str:
        path = None if _EXTERNAL.match(match[2]) else repository_path(page, match[2])
        return match[1] + posixpath.relpath(site_uri(path), here) + match[3] if path else match[0]

    return _LINK.sub(replace, markdown)


def with_lists_apart(markdown: str) -> str:
    """Sets an empty line before each list: CommonMark needs none, Python-Markdown does."""
    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        fenced ^= bool(_FENCE.match(line))
        before = lines[-1] if lines else ""
        is_text = bool(before.strip()) and not before.startswith(" ") and not _ITEM.match(before)
        if not fenced and is_text and _ITEM.match(line):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
