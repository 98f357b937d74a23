"""`regard doctor`: a report on this machine, on the kernels of a model's attention, or on the connections of ranks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import (
    Json,
    Nnodes,
    NodeRank,
    NprocPerNode,
    RdzvEndpoint,
    RdzvId,
    print_result,
    quiet_end,
    start_ranks,
)
from regard.cli.rank_errors import print_error, record_error
from regard.errors import RegardError
from regard.process_rank import Rank, current_rank

if TYPE_CHECKING:
    import torch

    from regard.models.analysis.kernel_report import KernelChoice


def doctor(
    context: typer.Context,
    target: Annotated[
        Path | None, typer.Argument(help="With --explain: a run or model folder, or a recipe; default: every scheme.")
    ] = None,
    why: Annotated[bool, typer.Option("--explain", help="Explain which kernel each attention layer runs on.")] = False,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Test the connections between several processes.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="With --explain: auto, cpu or cuda, present or not; with --distributed: present.")
    ] = "auto",
    length: Annotated[
        int | None, typer.Option(help="With --explain: tokens of a row; default: the model's max_len, or 4096.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="With --distributed: seconds to wait for a process.")] = 60,
    json: Json = False,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = None,
    rdzv_endpoint: RdzvEndpoint = "",
    rdzv_id: RdzvId = "regard",
) -> None:
    """Report versions, device, precision and folders of this machine.

    With --explain: the kernels that attention runs on. Model settings can be tried: --model.positions rope, ...

    With --distributed: whether the processes of a training run reach each other, agree and add correctly, and how fast.

    regard doctor --distributed --nproc-per-node gpu
    """
    if distributed:
        if target or why or length is not None or context.obj:
            raise RegardError("`regard doctor --distributed` takes no model, length or settings: leave them out")
        if timeout < 1:
            raise RegardError(f"--timeout must be at least 1 second, not {timeout:g}")
        if start_ranks(nproc_per_node, nnodes, node_rank, rdzv_endpoint, rdzv_id, 0, round(timeout)):
            return None
        return report_interconnect(device, timeout, json)
    if nproc_per_node is not None:
        raise RegardError("--nproc-per-node belongs to `regard doctor --distributed`: add --distributed")
    if why:
        from regard.models.analysis.kernel_report import format_choices

        rows = explain(target, context.obj, device, length)
        return print_result({"layers": [vars(row) for row in rows]}, True) if json else print(format_choices(rows))
    if target or length is not None or context.obj or device != "auto":
        raise RegardError("a model, a device, a length and settings belong to `regard doctor --explain`: add --explain")
    print_result(examine(), json)


def report_interconnect(device: str, timeout: float, json: bool) -> None:
    """Test the connections of this rank; rank 0 prints the report. A rank that does not answer is an error."""
    if "LOCAL_RANK" not in os.environ and "RANK" not in os.environ:
        raise RegardError(
            "`regard doctor --distributed` tests several processes: add --nproc-per-node N, or start it with torchrun"
        )
    from regard.training.interconnect import examine_interconnect, format_report, summarize

    rank = current_rank()
    report = examine_interconnect(rank, rank_device(device, rank), timeout, give_up)
    if report is None:
        return
    with quiet_end():
        print_result(summarize(report), True) if json else print(format_report(report))
    if report.problems:
        raise RegardError("; ".join(report.problems))


def rank_device(name: str, rank: Rank) -> torch.device:
    """Return the device of a rank: a GPU of its own, or the CPU where there are too few."""
    import torch

    from regard.device import pick_device

    kind, gpus = pick_device(name).type, torch.cuda.device_count()
    if kind == "cpu":
        return torch.device("cpu")
    if rank.local_count <= gpus:
        return torch.device("cuda", rank.local_index)
    if name != "auto":
        raise RegardError(
            f"{rank.local_count} processes need as many GPUs, but this machine has {gpus}: use --device cpu"
        )
    if rank.is_first:
        print(f"regard: {rank.local_count} processes for {gpus} GPUs: connections of CPUs are tested", file=sys.stderr)
    return torch.device("cpu")


def give_up(error: RegardError) -> None:
    """End this process with an error while its main thread hangs."""
    record_error(str(error), 2)
    print_error(str(error))
    sys.stderr.flush()
    os._exit(2)


LIBRARIES = (
    "torch",
    "tokenizers",
    "safetensors",
    "sacrebleu",
    "numpy",
    "zstandard",
    "matplotlib",
    "triton",
    "transformers",
    "fastapi",
)


def examine() -> dict[str, str]:
    """Return what `regard doctor` prints about this machine."""
    import torch

    import regard
    from regard import pretrained
    from regard.data.token_cache import cache_folder
    from regard.device import cpu_cores, describe, peak_flops, pick_device, pick_precision

    device = pick_device("auto")
    peak = peak_flops(device)
    free = shutil.disk_usage(Path.cwd()).free
    return {
        "regard": regard.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: installed_version(name) for name in LIBRARIES},
        "device": describe(device) + (f", {peak / 1e12:.0f} TFLOP/s bf16 by data sheet" if peak else ""),
        "precision": str(pick_precision("auto", device)).removeprefix("torch."),
        "cores": f"{cpu_cores()} usable, torch uses {torch.get_num_threads()} threads",
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "models": ", ".join(pretrained.bundled_models()) or "none bundled",
        "cache": f"{cache_folder()} (set REGARD_CACHE to move it)",
        "disk": f"{free / 1e9:,.0f} GB free here" + ("  <- little: checkpoints may fail" if free < 2e9 else ""),
    }


def installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def explain(
    target: Path | None, settings: Mapping[str, Any], device: str, length: int | None = None
) -> list[KernelChoice]:
    """Return which kernel every attention layer of a run, a model folder or a recipe runs on, and why.

    Without a target the model is a causal decoder, with each of the position schemes. `settings` are dotted,
    {"model.positions": "rope"}. The device need not be present, since the model is on the meta device. `length` is the
    number of tokens of a training row; by default the model's max_len, or 4096.
    """
    import torch

    from regard.inference.model_spec import build_config, recipe_of
    from regard.layers.positions.scheme import schemes_for
    from regard.models import gpt
    from regard.models.analysis.kernel_report import explain_model
    from regard.models.architectures import make_model

    device = device_type(device)
    if length is not None and length < 1:
        raise RegardError(f"--length must be at least 1, not {length}")
    with torch.device("meta"):
        if target is not None:
            config = recipe_of(target, settings).model
            model = make_model(replace(config, n_classes=max(1, config.n_classes)))  # the data determine the classes
            return explain_model(model, device, length or config.max_len)
        config = build_config({"model": {"preset": "gpt-small"}}, settings).model
        names = [config.positions] if "model.positions" in settings else schemes_for(config, "decoder")
        models = (gpt.GPT(replace(config, positions=name)) for name in names)
        return [row for model in models for row in explain_model(model, device, length or 4096)]


def device_type(name: str) -> str:
    """Return the type of a device, cpu or cuda, whether it is present or not."""
    from regard.device import pick_device

    kind = pick_device(name).type if name == "auto" else name.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise RegardError(f"unknown device '{name}': use auto, cpu, cuda or cuda:N")
    return kind
