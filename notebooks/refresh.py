"""Run the notebooks at full size and save them as they are committed: `python notebooks/refresh.py [NAME ...]`.

Kept are results only: no times of execution, no version of Python, no state of widgets (it dies with the kernel). So what
changes in a notebook when it is run again is what has changed in the results.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def refresh(path: Path) -> None:
    """Execute a notebook from top to bottom, and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": HERE}}
    NotebookClient(notebook, timeout=600, resources=place, record_timing=False).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    files = [HERE / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb"))
    for file in files:
        print(file.name, flush=True)
        refresh(file)
