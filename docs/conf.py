"""Configuration of the documentation site; `make docs` builds it, and a warning fails the build."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from autodoc import setup_autodoc  # noqa: E402  (both are beside this file)
from generate import links_to_pages, write_pages  # noqa: E402

from jaxscale.version import __version__  # noqa: E402

project = "jaxscale"
author = copyright = "jaxscale authors"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

smartquotes = False  # `--option` in prose keeps its two hyphens
nb_execution_mode = "off"  # notebooks are committed with their outputs
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4  # [text](page.md#heading) works as it does on GitHub

# Docstrings name code with single backquotes. What is the name of something documented becomes a link to it.
default_role = "py:obj"
# No nitpick (`-n`): most of what docstrings put into backquotes are expressions, which are nobody's names.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
suppress_warnings = ["ref.python"]  # annotations name a class without its module; jaxscale and jaxscale.nn have a Run
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_param = False  # one entry may be of several parameters
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Fields", "params_style")]

html_theme = "sphinx_book_theme"
html_title = "jaxscale"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "show_toc_level": 2,
}

PAGES = write_pages(DOCS)


def setup(app):
    """Let links of our pages to studies and notebooks go to their pages; in the repository they go to the files."""

    def read(app, name, source):
        page = Path(app.env.doc2path(name))
        if page.suffix == ".md" and page not in PAGES.values():
            source[0] = links_to_pages(source[0], page, PAGES)

    app.connect("source-read", read)
    setup_autodoc(app)
