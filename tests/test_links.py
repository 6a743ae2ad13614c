"""Relative links of every page point to a file, a folder or a heading that exists.

The build of the site (`make docs`) checks the links between its pages as well; this test also covers pages that are not
part of it, and does without Sphinx. `make docs-links` checks links to other sites.
"""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
GENERATED = ("docs/reference/", "docs/changelog.md", "docs/measured/results.md", "docs/internals/pallas_kernels.md")
"""Pages that only a build of the site has; it checks links to them."""

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "experiments/**/*.md", "pallas_kernels/**/*.md", "tests/**/*.md")
    for page in ROOT.glob(pattern)
    if not page.relative_to(ROOT).as_posix().startswith(("docs/_build/", "docs/measured/studies/", *GENERATED[:2]))
)
LINK = re.compile(r"\]\((?!\w+:)<?([^)#\s>]*)(?:#([^)\s>]*))?>?\)")


def prose(text: str) -> str:
    """Markdown without its code."""
    return re.sub(r"```.*?```|~~~.*?~~~|`[^`\n]*`", lambda m: "" if "\n" in m[0] else m[0], text, flags=re.S)


def anchors(text: str) -> set[str]:
    """The anchors of a page: its headings as GitHub writes them, and labels `(name)=`."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(text), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    slugs = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))


def dead_links(page: pathlib.Path, root: pathlib.Path = ROOT) -> list[str]:
    """Links of a page that lead nowhere."""
    text = page.read_text()
    dead = []
    for target, anchor in LINK.findall(prose(text)):
        place = (page.parent / target).resolve() if target else page
        if place.is_relative_to(root) and place.relative_to(root).as_posix().startswith(GENERATED):
            continue
        on_site = not target and page.is_relative_to(root / "docs")  # a label of any page; the build checks it
        alive = place.exists() and (not anchor or on_site or place.is_dir() or anchor in anchors(place.read_text()))
        if not alive:
            dead.append(f"{target}#{anchor}" if anchor else target)
    return dead


def test_a_link_that_leads_nowhere_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# The `name` of it\n\n[a](gone.md) [b](page.md#the-name-of-it) [c](#nothing) [d](https://x.org/y)\n"
        "![e](gone.png)\n```\n[f](code.md)\n```\n[g](docs/reference/commands.md)\n[h](.)\n"
    )
    assert dead_links(page, tmp_path) == ["gone.md", "#nothing", "gone.png"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    assert dead_links(page) == []
