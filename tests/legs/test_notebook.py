"""The notebook runs from end to end and draws its plots; takes nbclient, ipykernel, matplotlib.

python -m pytest tests/legs/test_notebook.py
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "own_model.ipynb"


def outputs(notebook):
    return [o for cell in notebook.cells for o in cell.get("outputs", ())]


def test_the_notebook_runs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type == "markdown" else cell.update(outputs=[])
    NotebookClient(
        notebook, timeout=600, kernel_name="python3"
    ).execute()  # raises what a cell does
    ran = outputs(notebook)
    assert sum("image/png" in output.get("data", {}) for output in ran) == 3
    text = "".join(output.text for output in ran if output.output_type == "stream")
    assert "6 units on tp=4: 2-way" in text
    assert "fits" in text
    assert "Traceback" not in text
