"""`regard filter`: denoise pictures, or synthesize a texture, with the filters in regard/filters.

The commands and their options are made from the catalogue of filters, which imports nothing heavy.
"""

from __future__ import annotations

import json as jsons
import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter as Argument
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import App, Device, Json, Quiet, check_settings, choose_output, free_path
from regard.errors import RegardError
from regard.filters.filter_registry import ALL, Filter, Parameter, option

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image as Picture


filter_app = App(help="Denoise pictures, or synthesize a texture.", invoke_without_command=True)


FOOT = """
Units are those of the picture: white is 255 with 8 bits, 65535 with 16. The noise is estimated from the picture.
regard filter NAME photo.png writes photo-NAME.png; `regard filter NAME --help` lists all options."""


@filter_app.callback()
def filters(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        check_settings(context)
        print("\n".join(describe(one) for one in ALL))
        print(FOOT)


def describe(one: Filter) -> str:
    """Return the name of a filter, what it does, and its parameters."""
    lines = [f"{option(p.name):<16} {default(p):<14} {p.help}" for p in one.parameters]
    return "\n    ".join([f"{one.name}: {one.line}", *lines])


def default(parameter: Parameter) -> str:
    if parameter.noises is not None:
        return f"{parameter.noises:g} x noise"
    return str("" if parameter.default is None else parameter.default)


# ---- a command for each filter ----------------------------------------------------------------------------------------

COMMON: dict[str, tuple[Any, Any]] = {
    "files": (Annotated[list[Path], typer.Argument(help="Pictures: PNG (8 bits, grey also 16), JPEG, TIFF, ...")], ...),
    "output": (
        Annotated[
            Path | None,
            typer.Option("--output", "-o", help="File to write, or a folder; by default PICTURE-FILTER.png."),
        ],
        None,
    ),
    "device": (Device, "auto"),
    "json": (Json, False),
    "quiet": (Quiet, False),
}
NOISY: dict[str, tuple[Any, Any]] = {
    "add_noise": (
        Annotated[float | None, typer.Option(min=0, help="Add Gaussian noise of this standard deviation first.")],
        None,
    ),
    "seed": (Annotated[int, typer.Option(min=0, help="Random seed of the added noise.")], 0),
    "compare": (Annotated[Path | None, typer.Option(help="Print the PSNR against this clean picture.")], None),
}


@dataclass(frozen=True)
class FilterRequest:
    """The filter, parameters, device and noise that all pictures of a call share."""

    one: Filter
    given: dict[str, Any]
    device: torch.device
    add_noise: float | None = None
    seed: int = 0
    compare: Path | None = None


def make_command(one: Filter) -> Callable[..., None]:
    """Return the command of a filter, whose options are its parameters and those that all filters have."""
    own = {p.name: (Annotated[p.kind | None, typer.Option(help=help_of(p))], None) for p in one.parameters}
    options = {**COMMON, **own, **(NOISY if one.denoises else {})}

    def command(**values: Any) -> None:
        run(one, {name: values.pop(name) for name in own}, **values)

    command.__doc__ = one.line
    command.__annotations__ = {name: kind for name, (kind, _) in options.items()}
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Argument(name, Argument.KEYWORD_ONLY, annotation=kind, default=Argument.empty if value is ... else value)
            for name, (kind, value) in options.items()
        ]
    )
    return command


def help_of(parameter: Parameter) -> str:
    return f"{parameter.help} ({default(parameter)})" if default(parameter) else parameter.help


for made in ALL:
    filter_app.command(made.name)(make_command(made))


# ---- filtering --------------------------------------------------------------------------------------------------------


def run(
    one: Filter,
    given: dict[str, Any],
    files: list[Path],
    output: Path | None,
    device: str,
    json: bool,
    quiet: bool,
    **noisy: Any,
) -> None:
    """Filter each file, and print the name of the result and its PSNR."""
    pairs = output_paths(one, files, output, noisy.get("compare"))
    if noisy.get("compare") and len(files) > 1:
        raise RegardError("--compare is for one picture: give one, or leave it out")
    from regard.device import pick_device
    from regard.terminal import progress_bar

    request = FilterRequest(one, given, pick_device(device), **noisy)
    with progress_bar(one.name, len(pairs), quiet) as advance:
        for source, target in pairs:
            result = filter_file(request, source, target)
            print(jsons.dumps(finite(result)) if json else show(result))
            advance(1)


def output_paths(
    one: Filter, files: list[Path], output: Path | None, compare: Path | None = None
) -> list[tuple[Path, Path]]:
    """Return each file with the path of its result: in a folder, the file's own name."""
    if output is None:
        chosen: list[Path] = []
        for path in files:
            chosen.append(free_path(Path(f"{path.stem}-{one.name}{default_ending(path)}"), chosen))
        return list(zip(files, chosen, strict=True))
    if len(files) == 1 and not output.is_dir() and output.suffix:
        return [(files[0], choose_output(output, "", (files[0], compare)))]
    if output.is_file() or (len(files) > 1 and output.suffix and not output.is_dir()):
        raise RegardError(f"{output} is no folder, and {len(files)} pictures need one: give a folder's name")
    names = [path.name for path in files]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RegardError(
            f"{min(twice)} is there twice, and both would be {output / min(twice)}: filter them one by one"
        )
    return [(path, choose_output(output / path.name, "", (*files, compare))) for path in files]


def default_ending(path: Path) -> str:
    """Return the ending of a result: .png, which loses nothing, or that of a picture of floating-point numbers."""
    return path.suffix if path.suffix.lower() in (".tif", ".tiff") else ".png"


def filter_file(request: FilterRequest, source: Path, target: Path) -> dict[str, Any]:
    """Filter one image, write the result, and return its settings and PSNR."""
    from regard.filters.image_arrays import apply, estimate_noise, peak_of
    from regard.filters.image_io import check_ending, open_picture, save_picture

    picture = open_picture(source)
    check_ending(target, picture)
    channels = sum(band != "A" for band in picture.getbands())
    noise = request.add_noise
    if noise is None and request.one.needs_noise(request.given):
        noise = max(estimate_noise(picture), peak_of(picture) / 255)  # no less than one grey level of 8 bits
    settings = request.one.settings(request.given, noise, channels)
    noisy: list[Any] = []  # the input of the filter, with noise

    def function(x: torch.Tensor) -> torch.Tensor:
        if request.add_noise is not None:
            x = add_noise(x, request.add_noise, request.seed)
        noisy.append(x)
        return request.one.function(x.to(request.device), **settings).cpu()

    made = apply(picture, function)
    result = {"input": str(source), "output": str(target), "filter": request.one.name, **settings}
    if noise is not None and request.add_noise is None:
        result["estimated_noise"] = round(noise, 3)
    if request.add_noise is not None or request.compare:
        clean = open_picture(request.compare) if request.compare else picture
        result |= compare(clean, noisy[0], made)
    save_picture(made, target)
    return result


def add_noise(x: torch.Tensor, noise: float, seed: int) -> torch.Tensor:
    """Add Gaussian noise in the units of `x`. It is not clipped, since clipping would remove noise from black and white."""
    import numpy as np
    import torch

    return x + torch.from_numpy(np.random.default_rng(seed).normal(0, noise, tuple(x.shape))).to(x)


def compare(clean: Picture, given: torch.Tensor, made: Picture) -> dict[str, float]:
    """Return the PSNR in dB of the filter's input, which is not rounded, and of its output, as it is written."""
    from regard.filters.image_arrays import apply, peak_of, psnr

    planes: list[Any] = []
    for picture in (clean, made):
        apply(picture, lambda x: planes.append(x) or x)  # type: ignore[func-returns-value]
    if planes[0].shape != given.shape or peak_of(clean) != peak_of(made):
        raise RegardError("--compare needs a picture of the same size, colours and bits as the one that is filtered")
    peak = peak_of(clean)
    return {"psnr_before": round(psnr(planes[0], given, peak), 2), "psnr": round(psnr(planes[0], planes[1], peak), 2)}


def finite(result: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity, the PSNR of identical pictures, by None, since JSON has no infinity."""
    return {name: None if value == math.inf else value for name, value in result.items()}


def show(result: dict[str, Any]) -> str:
    if "psnr" not in result:
        noise = f": noise estimated at {result['estimated_noise']:.3g}" if "estimated_noise" in result else ""
        return f"{result['output']}{noise}"
    return f"{result['output']}: PSNR {result['psnr_before']:.2f} dB before, {result['psnr']:.2f} dB after"
