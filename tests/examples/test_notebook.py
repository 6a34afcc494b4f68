"""The notebook runs from top to bottom, and prints what it shows."""

import contextlib
import io
import json

import matplotlib
import pages
from pages import ROOT


def test_its_cells_print_what_they_show():
    matplotlib.use("Agg")
    notebook = json.loads((ROOT / "examples" / "virtual_nodes.ipynb").read_text())
    scope: dict[str, object] = {"__name__": "__main__"}
    shown = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), scope)
        expected = "".join(text for output in cell["outputs"] for text in output["text"])
        assert pages.same(printed.getvalue(), expected)
        shown += bool(expected)
    assert shown
