"""docs/compare.ipynb runs from its first cell to its last, and shows what its text says."""

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow


def test_the_notebook_trains_two_skips_and_draws_their_ratios(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    text = (ROOT / "docs" / "compare.ipynb").read_text("utf-8")
    assert "--iterations 120" in text
    notebook = nbformat.reads(text.replace("--iterations 120", "--iterations 30"), as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    ratios = outputs[-1]["data"]["text/plain"].splitlines()[2:]
    plain, recursive = zip(*(map(float, line.split()[1:]) for line in ratios))
    assert plain == (1,) * 6 and all(value > 1.05 for value in recursive)
    assert any("1xSkip+LN" in output.get("data", {}).get("text/plain", "") for output in outputs)
