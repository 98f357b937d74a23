"""Filters beside scikit-image on one 512 x 512 photograph, and their denoising quality.

    python benchmarks/filters.py [--only nlm,bilateral,...] [--peers skimage] [--repeats 5] [--json FILE]
    python benchmarks/filters.py --psnr FOLDER     the table of PSNR on Set12_gray.tar and BSD68_gray.tar in that folder

Both sides do the same work, and the largest difference of their results is noted, for values from 0 to 1. Two parameters of
scikit-image mean something else than their documentation says, so the work is made equal:
- its fast non-local means with patches of 7 compares squares of 6 x 6 pixels and divides by 49: here as seven taps of which
  the first is 0;
- the table of spatial weights of its bilateral filter is one element longer than the window it is indexed by, which shears
  it: here it gets a table of the right length.
`large`: non-local means of 12 megapixels, on a GPU.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, parser, seconds, wall
from PIL import Image

from regard.filters.bilateral import bilateral
from regard.filters.gaussian import gaussian
from regard.filters.image_arrays import psnr
from regard.filters.nonlocal_means import PatchWeighting, nonlocal_means, nonlocal_means_numba
from regard.filters.texture import synthesise
from regard.filters.total_variation import total_variation

CPU = torch.device("cpu")
SIGMA = 20 / 255


def photograph(report: Report) -> np.ndarray:
    """Return the camera man with noise, float32 from 0 to 1; a gradient with noise if scikit-image is not used."""
    rng = np.random.default_rng(0)
    if report.options.tiny or "skimage" not in report.peers:
        n = 24 if report.options.tiny else 512
        clean = np.linspace(0, 1, n, dtype=np.float32) * np.ones((n, 1), np.float32)
    else:
        from skimage import data

        clean = data.camera().astype(np.float32) / 255
    return (clean + SIGMA * rng.normal(size=clean.shape)).astype(np.float32)


def compare(report: Report, what: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Report the times of both and the difference of their results. The first call of each warms up."""
    for who, run in (("regard", ours), ("skimage", theirs)):
        if who == "regard" or who in report.peers:
            run()
            report.put(what, who, 1e3 * seconds(run, CPU, report.options.repeats), "ms")
    if "skimage" in report.peers:
        report.note(f"{what}: results differ by {np.abs(np.asarray(ours()) - theirs()).max():.2g} at most")


# ---- beside scikit-image ----------------------------------------------------------------------------------------------


def as_skimage(h: float, patch: int, reach: int, sigma: float) -> PatchWeighting:
    """Return the weights of its fast mode: squares of patch - 1 pixels a side, whose sums are divided by patch^2."""
    return PatchWeighting(h, sigma * (patch - 1) / patch, (0.0, *[1 / patch] * (patch - 1)), reach)


def nlm(report: Report) -> None:
    image, h = photograph(report), 0.8 * SIGMA
    reach = 2 if report.options.tiny else 11

    def ours() -> np.ndarray:
        return nonlocal_means_numba(torch.from_numpy(image)[None, None], as_skimage(h, 7, reach, SIGMA), "pixel")[
            0, 0
        ].numpy()

    def theirs() -> np.ndarray:
        from skimage.restoration import denoise_nl_means

        return denoise_nl_means(image, 7, reach, h, fast_mode=True, sigma=SIGMA)

    compare(report, "nlm", ours, theirs)
    for what, mode in (("nlm, whole patches", "pixel"), ("nlm, patch-wise", "patch")):
        run = partial(nonlocal_means, image, h, 7, reach, SIGMA, mode)
        run()
        report.put(what, "regard", 1e3 * seconds(run, CPU, report.options.repeats), "ms")


def unsheared_weights(side: int, sigma: float, *, dtype: Any = float) -> np.ndarray:
    steps = np.arange(-(side // 2), side // 2 + 1.0) ** 2
    return np.exp(-0.5 * (steps[:, None] + steps) / sigma**2).astype(dtype).ravel()


def bilaterals(report: Report) -> None:
    image = photograph(report)
    image -= image.min()  # its constant border is 0 only if no value is below 0

    def theirs(sigma: int) -> np.ndarray:
        from skimage.restoration import _denoise

        _denoise._compute_spatial_lut = unsheared_weights
        return _denoise.denoise_bilateral(image, sigma_color=0.2, sigma_spatial=sigma)

    for sigma in (1, 3):
        ours = partial(bilateral, image, 0.2, sigma, border="constant")
        compare(report, f"bilateral, {sigma} px", ours, partial(theirs, sigma))


def tv(report: Report) -> None:
    image = photograph(report)

    def theirs() -> np.ndarray:
        from skimage.restoration import denoise_tv_chambolle

        return denoise_tv_chambolle(image, weight=0.7 * SIGMA)

    compare(report, "tv", lambda: total_variation(image, 0.7 * SIGMA), theirs)


def gaussians(report: Report) -> None:
    image = photograph(report)

    def theirs() -> np.ndarray:
        from skimage.filters import gaussian

        return gaussian(image, 2, mode="reflect")

    compare(report, "gaussian", lambda: gaussian(image, 2, border="symmetric"), theirs)


def texture(report: Report) -> None:
    (small, large), image = ((12, 16) if report.options.tiny else (64, 128)), photograph(report)
    grey, colour = image[:small, :small], np.stack([image] * 3)[:, :small, :small]
    for what, sample, axis in (("grey", grey, None), ("colour", colour, 0)):
        took = wall(partial(synthesise, sample, large, large, channel_axis=axis), CPU)
        report.put(f"texture, {what}, {small} to {large}", "regard", took, "s")


def large(report: Report) -> None:
    if report.device.type != "cuda":
        report.note("large: no GPU here")
        return
    image = torch.rand(3000, 4000, device=report.device)
    for mode in ("pixel", "patch"):
        run = partial(nonlocal_means, image, 0.8 * SIGMA, 7, 11, SIGMA, mode)
        run()
        report.put(f"nlm, 12 megapixels, {mode}", "regard", seconds(run, report.device, report.options.repeats), "s")


SECTIONS: dict[str, Callable[[Report], None]] = {
    "nlm": nlm,
    "bilateral": bilaterals,
    "tv": tv,
    "gaussian": gaussians,
    "texture": texture,
    "large": large,
}


# ---- PSNR -------------------------------------------------------------------------------------------------------------


def pictures(path: Path) -> Iterator[np.ndarray]:
    """Yield the grey pictures of an archive in the order of their names, from 0 to 255."""
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            file = archive.extractfile(member)
            if file is not None and member.name.endswith((".png", ".jpg", ".tif", ".bmp")):
                yield np.array(Image.open(BytesIO(file.read())).convert("L"), np.float32)


def psnr_table(folder: Path) -> None:
    """Print mean PSNR over the pictures, whose noise has a seed each and is not clipped; scikit-image with its recommended
    settings.
    """
    from skimage import data

    print("| pictures | sigma | noisy | scikit-image, fast, 5, 6, h = 0.8 sigma | regard, sigma alone |")
    print("|---|---|---|---|---|")
    sets = {"Set12": list(pictures(folder / "Set12_gray.tar")), "BSD68": list(pictures(folder / "BSD68_gray.tar"))}
    sets["camera"] = [data.camera().astype(np.float32)]
    for name, cleans in sets.items():
        for sigma in (20,) if name == "camera" else (15, 25, 50):
            found = np.mean([scores(clean, sigma, seed) for seed, clean in enumerate(cleans)], 0)
            print(f"| {name} ({len(cleans)}) | {sigma} | " + " | ".join(f"{x:.2f}" for x in found) + " |", flush=True)


def scores(clean: np.ndarray, sigma: float, seed: int) -> list[float]:
    from skimage.restoration import denoise_nl_means

    noisy = clean + sigma * np.random.default_rng(seed).normal(size=clean.shape).astype(np.float32)
    theirs = denoise_nl_means(noisy, 5, 6, 0.8 * sigma, fast_mode=True, sigma=sigma)
    return [psnr(clean, x, 255) for x in (noisy, theirs, nonlocal_means(noisy, sigma=sigma))]


def main() -> int:
    options = parser(__doc__, SECTIONS, ("skimage",), "skimage")
    options.add_argument("--psnr", type=Path, metavar="FOLDER", help="print the table of PSNR, and nothing else")
    chosen = options.parse_args()
    if chosen.psnr:
        psnr_table(chosen.psnr)
        return 0
    report = Report(chosen, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for name, run in SECTIONS.items():
        report.section(name, run)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
