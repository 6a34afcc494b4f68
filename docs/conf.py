"""Configuration of the documentation. ``make docs`` builds it, and warnings are errors."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "ext"))

import jdaso  # noqa: E402

project = "jdaso"
author = "the jdaso developers"
version = release = jdaso.__version__
html_title = "jdaso"
html_show_copyright = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "api_coverage",
    "bench_tables",
    "mathml",
]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short; Args of each docstring says the types
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # they are those of the NamedTuples, and shown there

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["jdaso.css"]
html_theme_options = {
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "navbar_persistent": [],
}

OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#]*\.md)(?:#[^)]*)?\)")


def link_to_files(app, name, source):
    """Turns links to Markdown files outside this folder, which GitHub shows, into downloads."""
    page = HERE / f"{name}.md"

    def replace(found):
        inside = (page.parent / found[1]).resolve().is_relative_to(HERE)
        return found[0] if inside else f"](path:{found[1]})"

    source[0] = OUTSIDE.sub(replace, source[0])


def shorten(app, what, name, found, options, signature, returns):
    """Prints ``...`` for a default that is a function, in place of its representation."""
    return signature and re.sub(r"<function .*?>(?=[,)])", "...", signature), returns


def setup(app):
    app.connect("source-read", link_to_files)
    app.connect("autodoc-process-signature", shorten)
