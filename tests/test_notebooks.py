"""The notebooks of the documentation: each runs from top to bottom on a CPU, and was run before it was committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks are read with nbformat")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def printed(notebook: Any) -> list[list[str]]:
    """Return the kinds of output of each code cell: stream, image/png, text/html or text/plain."""
    kinds = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found = [next(iter(sorted(out.data))) if "data" in out else out.output_type for out in cell.outputs]
            kinds.append(sorted(set(found)))  # one print may arrive in several pieces
    return kinds


def checks(notebook: Any) -> list[str]:
    """Return the comparisons with plain PyTorch that a notebook prints: lines that are or end with True or False."""
    text = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    return [line.split()[-1] for line in text.splitlines() if line.split()[-1:] in (["True"], ["False"])]


def test_all_four_are_there() -> None:
    names = ["attention-in-nine-steps", "look-inside", "positions-beyond-the-training-length", "train-a-translator"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_of_a_clean_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = path.read_text(encoding="utf-8")
    assert "/tmp/" not in text
    assert "/root/" not in text
    assert path.stat().st_size < 1_500_000
    assert not any(out.output_type == "error" for cell in notebook.cells for out in cell.get("outputs", []))
    assert any(printed(notebook)), "run it before it is committed: the site shows these outputs"
    assert "False" not in checks(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Each takes about a minute on an idle core; the kernel has this process's environment, so one thread."""
    from nbclient import NotebookClient

    committed = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert printed(notebook) == printed(committed)
    assert checks(notebook) == checks(committed)
