"""Writes the pages of the site that are generated: those of "Look up", and copies of pages that live elsewhere.

`conf.py` calls `write_pages` before Sphinx reads anything. git ignores what is written.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import lookup

from experiments import stale

NOTEBOOKS = "learn/notebooks"
STUDIES = "measured/studies"
RESULTS = "# Are the results current?\n\n"
RESULTS_NOTE = """
Each result names the commit whose sources were measured. Where these changed since, the result may no longer hold, and
was not measured again; `make stale` prints this table.
"""


LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def write_pages(docs: Path) -> dict[Path, Path]:
    """Write every generated page, and remove those of an earlier build that no longer have a source.

    Args:
        docs: The folder of `conf.py`.

    Returns:
        Files of the repository that are pages of the site -> their place there.
    """
    root = docs.parent
    pages = {
        root / "CHANGELOG.md": "changelog.md",
        root / "pallas_kernels" / "README.md": "internals/pallas_kernels.md",
        root / "pallas_kernels" / "CHOICES.md": "reference/choices.md",
        root / "pallas_kernels" / "BOUNDS.md": "measured/attention_bounds.md",
        root / "pallas_kernels" / "flash_attention" / "GRID.md": "measured/flash_attention_grid.md",
    }
    pages |= {path: f"{STUDIES}/{path.parent.name}.md" for path in sorted(root.glob("experiments/*/README.md"))}
    pages |= {
        path: f"{STUDIES}/{path.parent.name}-{path.stem.lower()}.md"
        for path in sorted(root.glob("experiments/*/*.md"))
        if path.name != "README.md"
    }
    places = {source: docs / page for source, page in pages.items()}
    places[root / "pallas_kernels" / "PARITY.md"] = docs / "reference" / "kernels.md"
    written = {}
    notes = stale.notes()
    for source, page in pages.items():
        note = notes.get(source.relative_to(root).as_posix(), "")
        written[page] = links_from(source.read_text(), source, docs / page, places) + note
    written["measured/results.md"] = RESULTS + stale.markdown() + RESULTS_NOTE
    notebooks = sorted(root.glob("notebooks/*.ipynb"))
    places |= {source: docs / NOTEBOOKS / source.name for source in notebooks}
    for source in notebooks:
        page = f"{NOTEBOOKS}/{source.name}"
        notebook = json.loads(source.read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = links_from("".join(cell["source"]), source, docs / page, places)
        written[page] = json.dumps(notebook)
    written |= lookup.pages()
    for folder in (NOTEBOOKS, STUDIES, "reference", "reference/settings", "reference/api"):
        for old in sorted((docs / folder).glob("*.*")):
            if f"{folder}/{old.name}" not in written and old.name != "index.md":
                old.unlink()
    for page, text in written.items():
        write(docs / page, text)
    return places


def write(path: Path, text: str) -> None:
    """Write a file unless it has that text already: Sphinx reads again only what changed."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def links_from(text: str, source: Path, page: Path, pages: dict[Path, Path]) -> str:
    """A Markdown text with its relative links rewritten, so that it can stand elsewhere.

    Args:
        text: The Markdown.
        source: The file that the links are relative to.
        page: The file that they have to be relative to.
        pages: Files that are pages of the site -> their place there. Links to other files become downloads; the text
            of a link to a folder stays and the link goes.
    """

    def moved(match: re.Match[str]) -> str:
        bang, label, target, anchor = match.groups()
        path = (source.parent / target).resolve()
        if path.is_dir() and path / "README.md" in pages:
            path = path / "README.md"
        if not path.is_file() and path not in pages.values():
            return label
        return f"{bang}[{label}]({os.path.relpath(pages.get(path, path), page.parent)}{anchor or ''})"

    return LINK.sub(moved, text)


def links_to_pages(text: str, page: Path, pages: dict[Path, Path]) -> str:
    """The Markdown of a page written by hand, whose links to files of the repository go to their pages of the site.

    Args:
        text: The Markdown.
        page: Its file; links are relative to it.
        pages: As for `links_from`. All other links stay as they are.
    """

    def moved(match: re.Match[str]) -> str:
        bang, label, target, anchor = match.groups()
        place = pages.get((page.parent / target).resolve())
        return match[0] if place is None else f"{bang}[{label}]({os.path.relpath(place, page.parent)}{anchor or ''})"

    return LINK.sub(moved, text)
