"""`regard filter` on image files."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from typer.testing import CliRunner

from regard.cli.main import app
from regard.errors import RegardError
from regard.filters.filter_registry import ALL, FILTERS, Filter
from regard.filters.gaussian import gaussian
from regard.filters.image_io import open_picture

PROGRAM = """
import sys
from regard.cli.main import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def filtered(*words: str | Path) -> str:
    ran = CliRunner().invoke(app, ["filter", *map(str, words), "--device", "cpu"], obj={}, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def save(path: Path, values: np.ndarray) -> Path:
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def grey(tmp_path: Path) -> Path:
    values = np.full((40, 48), 60, np.uint8)
    values[10:30, 12:36] = 190
    return save(tmp_path / "grey.png", values)


# ---- the catalogue ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_the_catalogue_says_what_the_functions_take(one: Filter) -> None:
    expected = {
        name: parameter.default
        for name, parameter in list(inspect.signature(one.function).parameters.items())[1:]
        if name != "channel_axis"
    }
    found = {p.name: inspect.Parameter.empty if p.needed else p.default for p in one.parameters}
    assert found == expected


def test_alone_it_lists_every_filter_with_defaults_and_units() -> None:
    listing = CliRunner().invoke(app, ["filter"], obj={}).stdout
    for one in ALL:
        assert f"{one.name}: {one.line}" in listing
        for parameter in one.parameters:
            assert f"--{parameter.name.replace('_', '-')} " in listing
            assert parameter.help in listing
    assert "--kappa          1 x noise      Difference" in listing


def test_the_list_does_not_wait_for_anything_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "filter"], capture_output=True, text=True, check=True)
    assert "gaussian: " in done.stdout
    assert [name for name in ("torch", "PIL", "numba", "numpy") if name in done.stderr.split()] == []


# ---- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_every_filter_makes_a_picture(one: Filter, grey: Path, tmp_path: Path) -> None:
    settings = {
        "gaussian": ["--sigma", "1"],
        "heat": ["--time", "0.3"],
        "texture": ["--height", "8", "--width", "9", "--window", "5"],
    }
    words = [*settings.get(one.name, []), *(["--add-noise", "20"] if one.denoises else [])]
    out = tmp_path / "out.png"
    printed = filtered(one.name, grey, "-o", out, *words)
    made = np.asarray(Image.open(out))
    assert made.dtype == np.uint8
    assert made.shape == ((40, 48) if one.denoises else (8, 9))
    if one.denoises:
        before, after = (float(part.split()[-2]) for part in printed.strip().removesuffix(" after").split(" before,"))
        assert before == pytest.approx(22.1, abs=0.3)
        assert after > before + 2


def test_the_file_is_what_the_function_makes(grey: Path, tmp_path: Path) -> None:
    filtered("gaussian", grey, "-o", tmp_path / "out.png", "--sigma", "1.5", "--border", "edge")
    expected = ndimage.gaussian_filter(np.asarray(Image.open(grey), dtype=float), 1.5, mode="nearest")
    assert np.abs(np.asarray(Image.open(tmp_path / "out.png")) - expected).max() < 0.501


def test_psnr_with_noise_is_that_of_a_seed_and_of_what_is_written(grey: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    result = json.loads(
        filtered("gaussian", grey, "-o", out, "--sigma", "0.8", "--add-noise", "20", "--seed", "3", "--json")
    )
    clean = np.asarray(Image.open(grey), dtype=float)
    noise = np.random.default_rng(3).normal(0, 20, (1, 1, 40, 48))[0, 0]

    def psnr(error: np.ndarray) -> float:
        return 10 * np.log10(255**2 / np.mean(error**2))

    assert result["psnr_before"] == pytest.approx(psnr(noise), abs=0.006)
    made = np.asarray(Image.open(out), dtype=float)
    assert np.abs(made - ndimage.gaussian_filter(clean + noise, 0.8)).max() < 0.51
    assert result["psnr"] == pytest.approx(psnr(made - clean), abs=0.006)
    assert {key: result[key] for key in ("filter", "sigma", "input", "output")} == {
        "filter": "gaussian",
        "sigma": 0.8,
        "input": str(grey),
        "output": str(out),
    }


def test_compare_is_against_another_picture(grey: Path, tmp_path: Path) -> None:
    brighter = save(tmp_path / "brighter.png", np.asarray(Image.open(grey)) + np.uint8(10))
    words = ["gaussian", grey, "-o", tmp_path / "out.png", "--sigma", "0", "--json", "--compare"]
    result = json.loads(filtered(*words, brighter))
    assert result["psnr"] == result["psnr_before"] == pytest.approx(20 * np.log10(25.5), abs=0.006)
    assert json.loads(filtered(*words, grey))["psnr"] is None  # infinite


def test_what_goes_with_the_noise_is_in_its_units(grey: Path, tmp_path: Path) -> None:
    colours = save(tmp_path / "colours.png", np.repeat(np.asarray(Image.open(grey))[..., None], 3, -1))
    words = ["-o", tmp_path / "out.png", "--add-noise", "10", "--json"]
    assert json.loads(filtered("tv", grey, *words))["weight"] == pytest.approx(7)
    assert json.loads(filtered("tv", grey, *words, "--weight", "3"))["weight"] == 3
    factor = next(p.noises for p in FILTERS["bilateral"].parameters if p.name == "sigma_color")
    assert factor is not None
    assert json.loads(filtered("bilateral", grey, *words))["sigma_color"] == pytest.approx(10 * factor)
    assert json.loads(filtered("bilateral", colours, *words))["sigma_color"] == pytest.approx(10 * factor * 3**0.5)


def test_sixteen_bits_stay_sixteen(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (12, 9)).astype(np.uint16)
    source = save(tmp_path / "deep.png", values)
    filtered("heat", source, "-o", tmp_path / "out.png", "--time", "2")
    made = np.asarray(Image.open(tmp_path / "out.png"))
    assert made.dtype == np.uint16
    assert np.abs(made - ndimage.gaussian_filter(values.astype(float), 2.0, truncate=10)).max() < 0.51


@pytest.mark.parametrize(("ending", "kind"), [("tif", ">u2"), ("tif", "<u2"), ("pgm", "<u2")])
def test_sixteen_bits_are_read_however_they_are_written(ending: str, kind: str, tmp_path: Path) -> None:
    values = np.array([[0, 1, 40000], [65535, 256, 3]], dtype=kind)
    picture = open_picture(save(tmp_path / f"deep.{ending}", values))
    assert picture.mode == "I;16"
    assert np.asarray(picture).tolist() == values.tolist()


def test_alpha_passes_and_palettes_become_colours(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    source = save(tmp_path / "alpha.png", rng.integers(0, 256, (8, 9, 4)).astype(np.uint8))
    filtered("gaussian", source, "-o", tmp_path / "out.png", "--sigma", "1")
    given, made = np.asarray(Image.open(source)), np.asarray(Image.open(tmp_path / "out.png"))
    assert (made[..., 3] == given[..., 3]).all()
    assert (made[..., :3] == gaussian(given[..., :3], 1.0, channel_axis=-1)).all()
    Image.fromarray(given[..., :3]).quantize(8).save(tmp_path / "palette.png")
    assert open_picture(tmp_path / "palette.png").mode == "RGB"


def test_several_pictures_go_into_a_folder_under_their_names(grey: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other.png", np.zeros((5, 6), np.uint8))
    printed = filtered("gaussian", grey, other, "-o", tmp_path / "new" / "folder", "--sigma", "1")
    assert printed.splitlines() == [str(tmp_path / "new" / "folder" / name) for name in ("grey.png", "other.png")]
    assert Image.open(tmp_path / "new" / "folder" / "other.png").size == (6, 5)
    filtered("gaussian", other, "-o", tmp_path / "new", "--sigma", "1")
    assert (tmp_path / "new" / "other.png").is_file()


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_every_filter_runs_without_options(
    one: Filter, grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = filtered(one.name, grey)
    assert printed.startswith(f"grey-{one.name}.png")
    assert ("noise estimated at" in printed) == bool(one.strength)
    first = (tmp_path / f"grey-{one.name}.png").read_bytes()
    assert filtered(one.name, grey).startswith(
        f"grey-{one.name}-2.png"
    )  # what was not asked for by name is not replaced
    assert (tmp_path / f"grey-{one.name}.png").read_bytes() == first
    size = Image.open(tmp_path / f"grey-{one.name}.png").size
    assert size == ((48, 40) if one.denoises else (96, 80))


@pytest.mark.parametrize("sigma", [4.0, 25.0])
def test_the_estimated_noise_is_that_which_was_added(sigma: float, tmp_path: Path) -> None:
    """On a ramp, whose wavelet coefficients are 0, up to the error of a median of n: 1.17 / sqrt(n) of sigma."""
    values = np.linspace(90, 160, 200)[:, None] + np.linspace(0, 10, 240)
    noisy = values + np.random.default_rng(1).normal(0, sigma, values.shape)
    picture = save(tmp_path / "noisy.png", noisy.round().clip(0, 255).astype(np.uint8))
    found = json.loads(filtered("nlm", picture, "-o", tmp_path / "out.png", "--json"))
    n = 99 * 119
    assert found["estimated_noise"] == pytest.approx(np.hypot(sigma, 12**-0.5), rel=4 * 1.17 / n**0.5)
    assert found["sigma"] == pytest.approx(found["estimated_noise"], abs=1e-3)
    given = json.loads(filtered("nlm", picture, "-o", tmp_path / "out.png", "--h", "9", "--json"))
    assert "estimated_noise" not in given


def test_a_file_that_is_named_and_there_is_replaced_with_a_word(grey: Path, tmp_path: Path) -> None:
    out = save(tmp_path / "out.png", np.zeros((2, 2), np.uint8))
    words = ["filter", "gaussian", str(grey), "-o", str(out), "--device", "cpu"]
    ran = CliRunner().invoke(app, words, obj={}, catch_exceptions=False)
    assert f"regard: {out} exists and will be replaced" in ran.stderr
    assert Image.open(out).size == (48, 40)


# ---- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["gaussian", "grey.png", "-o", "grey.png"], "is an input of this command and would be replaced"),
        (["gaussian", "grey.png", "-o", "out.png", "--sigma", "-1"], "a sigma of 0 or more"),
        (["perona-malik", "grey.png", "-o", "out.png", "--add-noise", "9", "--rate", "0.3"], "at most 0.25"),
        (["gaussian", "missing.png", "-o", "out.png", "--sigma", "1"], "there is no picture .*missing.png"),
        (["gaussian", "text.png", "-o", "out.png", "--sigma", "1"], "cannot be read as a picture"),
        (["gaussian", "grey.png", "-o", "out.xyz", "--sigma", "1"], "name ends in .png"),
        (["gaussian", "deep.png", "-o", "out.jpg", "--sigma", "1"], "cannot hold 16 bits"),
        (["gaussian", "deepcolour.png", "-o", "out.png", "--sigma", "1"], "of which 8 would be lost"),
        (["gaussian", "grey.png", "deep.png", "-o", "out.png", "--sigma", "1"], "give a folder's name"),
        (["gaussian", "grey.png", "grey.png", "-o", "folder", "--sigma", "1"], "there twice"),
        (
            ["gaussian", "grey.png", "-o", "out.png", "--sigma", "1", "--compare", "deep.png"],
            "same size, colours and bits",
        ),
        (["gaussian", "grey.png", "deep.png", "-o", "f", "--sigma", "1", "--compare", "grey.png"], "for one picture"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], what: str, grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("no picture")
    save(tmp_path / "deep.png", np.zeros((4, 4), np.uint16))
    header = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\0\0\0\1\0\0\0\1" + bytes([16, 2])
    (tmp_path / "deepcolour.png").write_bytes(header + bytes(20))
    with pytest.raises(RegardError, match=what):
        filtered(*words)
    assert not list(tmp_path.glob("out*"))


def test_a_name_that_is_none_is_answered_with_the_nearest() -> None:
    ran = CliRunner().invoke(app, ["filter", "gausian", "a.png", "-o", "b.png"], obj={})
    assert ran.exit_code == 2
    assert "Did you mean 'gaussian'?" in ran.output


def test_settings_of_a_recipe_do_not_belong_here() -> None:
    with pytest.raises(RegardError, match=r"--train\.steps does not belong here"):
        CliRunner().invoke(app, ["filter"], obj={"train.steps": "3"}, catch_exceptions=False)
