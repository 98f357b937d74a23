"""The study of filters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from regard.cli.study_commands import study_app
from regard.errors import RegardError
from regard.filters.gaussian import gaussian
from regard.studies.filter_study import ROWS, make_picture


def run(*words: str | Path) -> str:
    ran = CliRunner().invoke(study_app, ["filters", *map(str, words)], catch_exceptions=False)
    assert ran.exit_code == 0
    return ran.stdout


def test_it_writes_table_numbers_and_picture(tmp_path: Path) -> None:
    printed = run("--output", tmp_path, "--device", "cpu")
    results = json.loads((tmp_path / "results.json").read_text())
    assert printed.strip() == (tmp_path / "table.md").read_text().strip()
    assert (tmp_path / "filters.png").read_bytes().startswith(b"\x89PNG")
    found = {name: row["psnr"] for name, row in results["rows"].items()}
    assert list(found) == list(ROWS)
    noise = np.random.default_rng(0).normal(0, 20, (256, 256))
    noisy = make_picture()[0] + noise.astype(np.float32)
    error = gaussian(noisy, 0.9) - make_picture()[0]
    assert results["noisy"] == pytest.approx(10 * np.log10(255**2 / np.mean(noise**2)), abs=1e-3)
    assert found["Gaussian"] == pytest.approx(10 * np.log10(255**2 / np.mean(error**2)), abs=1e-3)
    assert found["Gaussian"] < min(found[name] for name in ROWS if name != "Gaussian")  # it blurs edges, they do not
    assert max(found, key=lambda name: found[name]) == "non-local means"
    assert "| total variation | the whole picture, as one problem | weight 14 (0.7 sigma) |" in printed


def test_a_picture_in_colour_is_read_and_filtered_in_colour(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (4, 5, 4)).astype(np.uint8).repeat(6, 0).repeat(6, 1)
    Image.fromarray(values).save(tmp_path / "colours.png")
    run("--image", tmp_path / "colours.png", "--sigma", "10", "--output", tmp_path / "out", "--device", "cpu")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["size"] == [24, 30]
    assert results["noisy"] == pytest.approx(20 * np.log10(25.5), abs=0.3)
    assert all(row["psnr"] > results["noisy"] for name, row in results["rows"].items() if name != "Gaussian")


@pytest.mark.parametrize("sigma", ["0", "-3", "255"])
def test_noise_out_of_range_is_refused(sigma: str, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="above 0 and below 255"):
        run("--sigma", sigma, "--output", tmp_path)


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(RegardError, match="more than 8 bits"):
        run("--image", tmp_path / "deep.png", "--output", tmp_path)
