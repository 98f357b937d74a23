"""`regard study filters`: one noisy picture through five filters, side by side, with the PSNR of each.

From the first to the last, the weights depend on more: on the position of a pixel, then on its difference from its
neighbours, and at last on the similarity of patches, which is attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.device import pick_device
from regard.errors import RegardError
from regard.files import write_text
from regard.filters.filter_registry import FILTERS
from regard.filters.image_arrays import psnr
from regard.filters.image_io import open_picture
from regard.look.figures import save
from regard.studies.job_pool import describe_setting

# Filter, what its weights depend on, and settings that do not depend on the noise; the catalogue derives the others.
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Gaussian": ("gaussian", "position", {"sigma": 0.9}),
    "anisotropic diffusion": ("perona-malik", "values of four neighbours", {}),
    "total variation": ("tv", "the whole picture, as one problem", {}),
    "bilateral": ("bilateral", "position and value", {"sigma_spatial": 1.5}),
    "non-local means": ("nlm", "patches", {}),
}


def study(out: Path, image: Path | None = None, sigma: float = 20.0, seed: int = 0, device: str = "auto") -> Path:
    """Write results.json, table.md and filters.png into `out`, and return it. `sigma` is on the scale 0 to 255."""
    if not 0 < sigma < 255:
        raise RegardError(
            f"noise of {sigma:g}: give a standard deviation above 0 and below 255, on pictures of 0 to 255"
        )
    where = pick_device(device)
    clean = read_picture(image) if image else make_picture()  # (C, H, W)
    noisy = clean + np.random.default_rng(seed).normal(0, sigma, clean.shape).astype(np.float32)
    pictures, rows = {"input": clean, "noisy": noisy}, {}
    for name, (which, weights, given) in ROWS.items():
        settings = FILTERS[which].settings(given, sigma, len(clean))
        found = FILTERS[which].function(torch.from_numpy(noisy).to(where), **settings)
        pictures[name] = found.cpu().numpy()
        rows[name] = {
            "filter": which,
            "weights": weights,
            "settings": settings,
            "psnr": psnr(clean, pictures[name], 255),
        }
    results = {
        "setting": describe_setting(str(where), False),
        "image": str(image or "synthetic"),
        "sigma": sigma,
        "seed": seed,
    }
    results |= {"size": list(clean.shape[1:]), "noisy": psnr(clean, noisy, 255), "rows": rows}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    save(plot_pictures(pictures, results), out / "filters.png")
    return out


def read_picture(path: Path) -> np.ndarray:
    """Return a picture as (C, H, W) from 0 to 255, without its transparency."""
    picture = open_picture(path)
    if picture.mode not in ("L", "LA", "RGB", "RGBA"):
        raise RegardError(f"{path} has more than 8 bits for each colour: convert it first")
    values = np.asarray(picture.convert("L" if picture.mode in ("L", "LA") else "RGB"), dtype=np.float32)
    return values[None] if values.ndim == 2 else np.ascontiguousarray(values.transpose(2, 0, 1))


def make_picture(size: int = 256) -> np.ndarray:
    """Return a picture (1, H, W) that is hard for filters: a slope, flat shapes, thin lines, repeating textures."""
    y, x = np.mgrid[:size, :size] / size
    image = 60 + 120 * x
    image[np.hypot(y - 0.27, x - 0.27) < 0.18] = 210
    image[np.hypot(y - 0.27, x - 0.27) < 0.08] = 40
    square = (abs(y - 0.28) < 0.16) & (abs(x - 0.74) < 0.18)
    image[square] = (40 + 60 * (np.floor(24 * x) % 2 + np.floor(24 * y) % 2))[square]
    waves = (y > 0.55) & (x < 0.48)
    image[waves] = (128 + 70 * np.sin(2 * np.pi * (14 * x + 4 * np.sin(6 * y))))[waves]
    lines = (y > 0.55) & (x > 0.55) & (np.floor(size * (x + 0.5 * y)) % 12 < 2)
    image[lines] = 20
    return image.astype(np.float32)[None]


# ---- report -----------------------------------------------------------------------------------------------------------


def format_table(results: dict[str, Any]) -> str:
    """Return the Markdown report."""
    sigma, where = results["sigma"], results["setting"]
    lines = ["| filter | weights see | settings | PSNR, dB |", "|---|---|---|---:|"]
    lines.append(f"| none | | | {results['noisy']:.2f} |")
    for name, row in results["rows"].items():
        lines.append(f"| {name} | {row['weights']} | {format_settings(row, sigma)} | {row['psnr']:.2f} |")
    note = (
        f"{results['image']}, {results['size'][1]} x {results['size'][0]}; Gaussian noise of sigma {sigma:g} out of 255, "
        f"seed {results['seed']}, not clipped; pixels or units of 255. {where['device']}, torch {where['torch']}, "
        f"{where['date'][:10]}."
    )
    return "\n".join(lines) + f"\n\n{note}\n\n```\n{where['command']}\n```\n"


def format_settings(row: dict[str, Any], sigma: float) -> str:
    """Return the settings of a filter in words; those that depend on the noise also as multiples of sigma."""
    with_noise = {parameter.name for parameter in FILTERS[row["filter"]].parameters if parameter.noises is not None}
    return ", ".join(
        f"{name} {value:.4g}" + (f" ({value / sigma:.3g} sigma)" if name in with_noise else "")
        for name, value in row["settings"].items()
    )


def plot_pictures(pictures: dict[str, np.ndarray], results: dict[str, Any]) -> Any:
    """Return a figure of all pictures in two rows, on one grey scale."""
    from matplotlib.figure import Figure

    scores = {"noisy": results["noisy"], **{name: row["psnr"] for name, row in results["rows"].items()}}
    drawn = Figure(figsize=(13.2, 7.2), dpi=100, layout="constrained")
    for place, (name, picture) in enumerate(pictures.items(), 1):
        axes = drawn.add_subplot(2, 4, place)
        bytes_ = picture.round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
        axes.imshow(bytes_.squeeze(-1) if bytes_.shape[-1] == 1 else bytes_, cmap="gray", vmin=0, vmax=255)
        axes.set_title(f"{name}, {scores[name]:.2f} dB" if name in scores else name, fontsize=10)
        axes.axis("off")
    return drawn
