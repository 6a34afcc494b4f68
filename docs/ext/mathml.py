"""Equations as MathML, which browsers show without scripts and without a network."""

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import ExtensionError


def mathml(node, as_block: bool) -> str:
    """The equation of a node. An error names the page."""
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        raise ExtensionError(f"{node.source}, ${node.astext()}$: {error}") from error


def inline(translator, node):
    translator.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def block(translator, node):
    translator.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True}
