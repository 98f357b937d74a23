"""`regard cost` and `regard summary`: parameters, FLOPs and memory of a model, in total and layer by layer.

With `--gpus`, `--gpu` or `--mesh`, `regard cost` predicts training on many GPUs."""

from __future__ import annotations

import json as jsons
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import Json, section_settings
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.config import ModelConfig
    from regard.models.analysis.scaling import MeshChoice, StepPrediction

Length = Annotated[int | None, typer.Option(help="Tokens in a row; by default the model's max_len.")]
Batch = Annotated[int, typer.Option(help="Number of rows in a batch.")]


def planning(*names: str, help: str) -> Any:
    """Return an option of planning, which help lists in a panel of its own."""
    return typer.Option(*names, help=help, rich_help_panel="Many GPUs")


def summary(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A run or model folder, a preset or a recipe; `regard cost` lists presets.")
    ],
    depth: Annotated[int, typer.Option(help="1 shows stacks, 2 their blocks, 3 the sublayers of those.")] = 2,
    length: Length = None,
    source_length: Annotated[int | None, typer.Option(help="Tokens of a source row; by default --length.")] = None,
    batch: Batch = 1,
    json: Json = False,
) -> None:
    """Count parameters, FLOPs of a forward pass and bytes of every layer.

    The model runs on the meta device, so its size does not matter. Model settings can be tried: --model.n_kv_heads 8, ...
    """
    from regard.inference.model_spec import summary as summarize

    settings = section_settings(context, "model")
    found = summarize(model, batch=batch, length=length, source_length=source_length, depth=depth, settings=settings)
    print(jsons.dumps(found.to_dict(), ensure_ascii=False) if json else found)


def cost(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="A preset, a recipe, or a run or model folder; by default list the presets.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Training tokens, such as 300e9, 300B or 1.4T.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Number of rows in a batch, of all GPUs together; by default 1, or 1 a rank.")
    ] = None,
    batch_tokens: Annotated[
        str | None, typer.Option(help="Tokens in a batch, of all GPUs together, instead of --batch.")
    ] = None,
    length: Length = None,
    gpus: Annotated[
        str | None, planning("--gpus", help="Number of GPUs; by default the fewest that fit; 64,256 prints a table.")
    ] = None,
    gpu: Annotated[str | None, planning("--gpu", help="Kind of GPU: h200 (default), h100, a100 or a100-40gb.")] = None,
    mesh: Annotated[
        str | None,
        planning("--mesh", help="Ranks along each axis: data=8,shard=4,tensor=2; by default the fastest that fits."),
    ] = None,
    bandwidth: Annotated[
        float | None, planning("--bandwidth", help="GB/s of a GPU in one direction inside a node; default: NVLink.")
    ] = None,
    network: Annotated[
        float | None, planning("--network", help="GB/s of a GPU in one direction between nodes; default: a DGX.")
    ] = None,
    gpus_per_node: Annotated[int | None, planning("--gpus-per-node", help="GPUs in a node; 8 by default.")] = None,
    efficiency: Annotated[
        float | None, planning("--efficiency", help="Share of its peak that a GPU reaches while computing; 0.55.")
    ] = None,
    accumulate: Annotated[
        int | None, planning("--accumulate", help="Batches of a rank per step; by default what is fastest and fits.")
    ] = None,
    activation_checkpointing: Annotated[
        bool | None,
        planning(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Recompute activations; by default what is fastest and fits.",
        ),
    ] = None,
    param_dtype: Annotated[
        str | None, planning("--param-dtype", help="Data type of parameters: fp32 (default) or bf16.")
    ] = None,
    json: Json = False,
) -> None:
    """Count a model's parameters, FLOPs and memory without allocating it.

    With --gpus, --gpu or --mesh, predict memory, communication and time of training on many GPUs.

    Model settings can be tried: --model.n_kv_heads 8, ...
    """
    settings = section_settings(context, "model")
    cluster = {"gpu": gpu, "gpus_per_node": gpus_per_node, "bandwidth": bandwidth, "network": network}
    cluster |= {"efficiency": efficiency}
    work = {"accumulate": accumulate, "activation_checkpointing": activation_checkpointing, "param_dtype": param_dtype}
    planned = [name for name, value in {"gpus": gpus, "mesh": mesh, **cluster, **work}.items() if value is not None]
    sizes = (tokens, length, batch, batch_tokens)
    if name is None and (settings or planned or any(size is not None for size in sizes)):
        raise RegardError(
            "tokens, rows and settings belong to a model: give the name of a preset, a recipe or a folder"
        )
    if name is None:
        result: dict[str, Any] = {"presets": list_presets()}
        return print(jsons.dumps(result) if json else presets_table(result["presets"]))
    from regard.inference.model_spec import config_of
    from regard.models.analysis.cost import report_costs
    from regard.models.analysis.summary import check_lengths

    config, assumed = config_of(name, settings)
    length = config.max_len if length is None else length
    rows = find_rows(batch, batch_tokens, length)
    check_lengths(config, 1 if rows is None else rows, length)
    result = {"model": name, "assumed": assumed}
    if planned:
        if tokens is not None:
            raise RegardError("--tokens is for one GPU: leave it out, or leave out the options of many GPUs")
        if gpus is None and mesh is None and gpu is None:
            raise RegardError(f"--{planned[0].replace('_', '-')} is for many GPUs: give --gpus, --gpu or --mesh too")
        work |= {"length": length, "batch": rows}
        choices = choose_meshes(config, gpus, mesh, cluster, work)
        result |= {"architecture": config.architecture, "predictions": [choice_dict(choice) for choice in choices]}
        if json:
            return print(jsons.dumps(result, ensure_ascii=False))
        title = f"{name} ({config.architecture})"
        report = mesh_report(title, choices[0], mesh, gpus) if len(choices) == 1 else mesh_table(title, choices)
        return print("\n\n".join([report, *assumption_notes(assumed)]))
    result |= report_costs(config, rows or 1, length, None if tokens is None else parse_tokens(tokens))
    print(jsons.dumps(result, ensure_ascii=False) if json else cost_report(result))


def find_rows(batch: int | None, batch_tokens: str | None, length: int) -> int | None:
    """Return the rows of a batch, or None where they are left open."""
    if batch_tokens is None:
        return batch
    if batch is not None:
        raise RegardError("--batch and --batch-tokens say the same: give one of them")
    rows = parse_tokens(batch_tokens, "--batch-tokens") // max(1, length)
    if rows < 1:
        raise RegardError(f"--batch-tokens {batch_tokens} is less than one row of {length:,} tokens (--length)")
    return rows


def parse_tokens(text: str, option: str = "--tokens") -> int:
    """Return the number that 300e9, 300B, 1.4T, 20M or 5k stands for."""
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d\d?)?)([kmbt]?)", text.replace(",", "").replace("_", "").lower())
    number = round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[found[2]]) if found else 0
    if number < 1:
        raise RegardError(f"{option} is a number such as 300e9, 300B or 1.4T, not '{text}'")
    return number


def list_presets() -> list[dict[str, Any]]:
    """Return the sizes of every preset."""
    from regard.inference.model_spec import config_of
    from regard.models.analysis.cost import Cost
    from regard.models.architectures import PRESETS

    rows = []
    for name in PRESETS:
        config, assumed = config_of(name, {})
        cost = Cost(config)
        rows.append(
            {
                "preset": name,
                "architecture": config.architecture,
                "blocks": cost.blocks,
                "d_model": config.d_model,
                "n_heads": config.n_heads,
                "parameters": cost.parameters,
                "assumed": assumed,
            }
        )
    return rows


# ---- as text ---------------------------------------------------------------------------------------------------------

PARAMETERS = (
    "Counted on the model, built on the meta device. Trained: all parameters, tied ones once. Active: weights that one",
    "token is multiplied with; an embedding look-up is not counted.",
)
FLOPS = (
    "Counted by running the model on the meta device: matrix products only, 2 for each multiply-add; attention in full,",
    "masked or not; a backward pass is 2 forwards.",
)
BOTH_SIDES = "A token is one of the target with one of the source; rows are as long on both sides."
PATCHES = "A token is a patch, or the class token."
TRAINING = (
    "fp32 weights and AdamW, products in bf16. Activations are an estimate: fused attention, nothing recomputed.",
)


def presets_table(rows: list[dict[str, Any]]) -> str:
    """Return the sizes of presets as a table."""
    from regard.terminal import format_table

    cells: list[tuple[str, ...]] = [("preset", "architecture", "blocks", "width", "heads", "parameters")]
    for row in rows:
        numbers = (f"{row[key]:,}" if row[key] else "-" for key in ("blocks", "d_model", "n_heads", "parameters"))
        cells.append((row["preset"], row["architecture"], *numbers))
    vocab = next((n for row in rows for field, n in row["assumed"].items() if "vocab" in field), None)
    note = [f"Where a vocabulary comes from the data, {vocab:,} pieces are counted."] if vocab else []
    return "\n".join(format_table(cells, 2) + note)


def cost_report(result: dict[str, Any]) -> str:
    """Return the costs of a model as tables, with what was assumed below them."""
    title = f"{result['model']} ({result['architecture']})"
    tables = [parameters_table(result), flops_table(result), training_table(result), decoding_table(result)]
    return "\n\n".join(["\n".join(lines) for lines in ([title], *tables)] + assumption_notes(result["assumed"]))


def assumption_notes(assumed: dict[str, Any]) -> list[str]:
    """Return a paragraph of the sizes that only the data determine, or none."""
    notes = [f"model.{field} comes from the data: {n:,} assumed" for field, n in assumed.items()]
    return ["\n".join(notes)] if notes else []


def parameters_table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table of parameters."""
    from regard.terminal import format_table

    found = result["parameters"]
    rows: list[tuple[str, ...]] = [("parameters", "shape", "number", "total")]
    for row in found["rows"]:
        shape = " x ".join(f"{n:,}" for n in row["shape"]) or "1"
        rows.append(
            (row["name"] + (" (tied)" if row["tied"] else ""), shape, f"{row['number']:,}", f"{row['total']:,}")
        )
    rows.append(("trained", "", "", f"{found['trained']:,}"))
    rows.append(("active", "", "", f"{found['active']:,}"))
    return [*format_table(rows, 2), *PARAMETERS]


def flops_table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table of FLOPs."""
    from regard.models.architectures import ARCHITECTURES
    from regard.terminal import format_table

    found = result["flops"]
    rows = [
        ("forward", f"{found['forward_per_token']:.4g} a token"),
        ("training", f"{found['training_per_token']:.4g} a token"),
    ]
    if "tokens" in found:
        example = found["example"]
        days = f"{example['days']:,.1f} days on one {example['gpu']} at {example['mfu']:.0%} of its peak"
        rows.append((f"{found['tokens']:,} tokens", f"{found['training']:.4g}: {days}"))
    kind = ARCHITECTURES[result["architecture"]]
    meaning = [BOTH_SIDES] if kind.translates else [PATCHES] if kind.sees_images else []
    return [f"FLOPs in rows of {result['length']:,} tokens", *format_table(rows, 2), *FLOPS, *meaning]


def training_table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table of memory in training."""
    from regard.terminal import format_bytes, format_table

    rows = [(name, format_bytes(n)) for name, n in result["memory"]["training"].items()]
    return [f"memory to train {result['batch']:,} x {result['length']:,} tokens", *format_table(rows, 1), *TRAINING]


def decoding_table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table of memory in decoding."""
    from regard.terminal import format_bytes, format_table

    found = result["memory"]["decoding"]
    rows = [
        ("weights", f"{format_bytes(found['weights_bf16'])} in bf16, {format_bytes(found['weights_fp32'])} in fp32")
    ]
    if "state_per_row" in found:
        rows.append(("state", f"{format_bytes(found['state_per_row'])} a row of any length"))
    if "cache_bf16" in found:
        each, whole = format_bytes(found["cache_bf16_per_token"]), format_bytes(found["cache_bf16"])
        rows.append(
            ("cache", f"{each} a token, {whole} for {result['batch']:,} x {result['length']:,}, in bf16; twice in fp32")
        )
    return ["memory to use it", *format_table(rows, 2)]


# ---- many GPUs -------------------------------------------------------------------------------------------------------


def choose_meshes(
    config: ModelConfig, gpus: str | None, mesh: str | None, cluster: dict[str, Any], work: dict[str, Any]
) -> list[MeshChoice]:
    """Return the prediction for the mesh that was given, or for the best mesh of each number of GPUs."""
    from regard.models.analysis.gpu_cluster import make_cluster, parse_mesh
    from regard.models.analysis.scaling import MeshChoice, ScalingPlanner, Workload

    given = {name: value for name, value in work.items() if value is not None}
    wanted = Workload(**given)
    if wanted.param_dtype not in ("fp32", "bf16"):
        raise RegardError(f"--param-dtype is fp32 or bf16, not '{wanted.param_dtype}'")
    if wanted.accumulate is not None and wanted.accumulate < 1:
        raise RegardError(f"--accumulate must be at least 1, not {wanted.accumulate}")
    planner = ScalingPlanner(config, make_cluster(**{k: v for k, v in in_bytes(cluster).items() if v is not None}))
    numbers = [None] if gpus is None else [parse_count(text) for text in gpus.split(",")]
    if mesh is None:
        return [planner.smallest_mesh(wanted, number) for number in numbers]
    if len(numbers) > 1:
        raise RegardError(f"--mesh {mesh} is for one number of GPUs, and --gpus {gpus} has {len(numbers)}")
    return [MeshChoice(planner.predict(parse_mesh(mesh, numbers[0]), wanted), ())]


def in_bytes(cluster: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a cluster with bandwidths as bytes/s; on the command line they are GB/s."""
    scaled = {name: cluster[name] and 1e9 * cluster[name] for name in ("bandwidth", "network")}
    return {**cluster, **scaled}


def parse_count(text: str) -> int:
    """Return a number of GPUs."""
    number = text.strip().replace("_", "")
    if not number.isdecimal() or not 1 <= int(number) <= 1 << 20:
        raise RegardError(f"--gpus '{text}' is no number of GPUs: give one as in 64, or several as in 64,256")
    return int(number)


def choice_dict(choice: MeshChoice) -> dict[str, Any]:
    """Return a chosen mesh and those that do not fit as JSON types."""
    refused = [{"mesh": one.mesh._asdict(), "gpus": one.mesh.gpus, "peak": one.peak_memory} for one in choice.refused]
    return {**choice.chosen.to_dict(), "refused": refused}


NOTHING_RAN = "A prediction from a model of costs; nothing was run or measured."
SHOWN = 5  # meshes that do not fit


def mesh_report(title: str, choice: MeshChoice, mesh: str | None, gpus: str | None) -> str:
    """Return the prediction for one mesh as tables, with what was assumed below them."""
    from regard.models.analysis.scaling import PHASES
    from regard.terminal import format_bytes, format_table

    one, gpu = choice.chosen, choice.chosen.cluster.gpu
    state = "fits" if one.fits else "does not fit"
    chosen = "" if mesh else ", the fastest that fits" if one.fits else ", which needs the least"
    rows = [
        ("mesh", f"{one.mesh}{chosen}"),
        ("step", f"{one.rows:,} rows of {one.work.length:,} tokens, {batches_text(one)}"),
        ("memory", f"{format_bytes(one.peak_memory)} a rank {PHASES[one.phase]}: {state} {format_bytes(gpu.memory)}"),
        ("time", f"{one.seconds:.4g} s a step: {one.computing:.4g} s computing, {one.exposed:.4g} s communication"),
        ("speed", f"{one.tokens_per_second:,.0f} tokens/s, MFU {one.mfu:.1%}"),
    ]
    parts = [(name, format_bytes(n)) for name, n in one.memory[one.phase].items() if n]
    memory = [("memory of a rank", ""), *parts, ("total", format_bytes(one.peak_memory))]
    sections = [[f"{title} on {one.mesh.gpus:,} x {gpu.name}. {NOTHING_RAN}"], format_table(rows, 2)]
    sections.append(format_table(memory, 1))
    if one.communication:
        sent = [
            (f"{c.axis}, {c.operation}", format_bytes(c.sent), f"{c.seconds:.4g} s", f"{c.hidden:.4g} s")
            for c in one.communication
        ]
        sections.append(format_table([("communication of a rank", "sent", "time", "hidden"), *sent], 1))
    sections += [refused_lines(choice, mesh, gpus), assumed_lines(one)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def batches_text(one: StepPrediction) -> str:
    """Return how a rank computes its share of a step."""
    from regard.models.analysis.scaling import batch_rows

    rows, times = batch_rows(one.mesh, one.work), one.work.accumulate or 1
    each = f"{rows:,} a rank" + (f" {times:,} times (train.accumulate)" if times > 1 else "")
    recomputed = "with" if one.work.activation_checkpointing else "without"
    return f"{each}, {recomputed} activation checkpointing, {one.work.param_dtype} parameters"


def refused_lines(choice: MeshChoice, mesh: str | None, gpus: str | None) -> list[str]:
    """Return what does not fit, and why."""
    one = choice.chosen
    if not one.fits:
        what = f"The mesh {one.mesh}" if mesh else f"No mesh of {one.mesh.gpus:,} GPUs fits: {one.mesh}"
        return [f"{what} needs {largest_parts(one)}."]
    if not choice.refused:
        return []
    reason = "Faster meshes that do not fit:" if gpus else "Fewer GPUs do not fit:"
    shown = choice.refused[:SHOWN] if gpus else choice.refused[-SHOWN:]
    return [reason, *(f"{other.mesh} needs {largest_parts(other)}" for other in shown)]


def largest_parts(one: StepPrediction) -> str:
    """Return the memory of a rank, and the largest three of its parts."""
    from regard.terminal import format_bytes

    parts = sorted(one.memory[one.phase].items(), key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts)
    return f"{format_bytes(one.peak_memory)} a rank ({listed}, ...)"


def assumed_lines(one: StepPrediction) -> list[str]:
    """Return the numbers of the GPUs and of the cluster that a prediction is made of."""
    from regard.terminal import format_bytes

    cluster, gpu = one.cluster, one.cluster.gpu
    return [
        f"Assumed of {gpu.name}: {format_bytes(gpu.memory)}, and {cluster.efficiency:.0%} of {gpu.peak / 1e12:.0f} TFLOP/s "
        "in bf16 while it computes (memory and TFLOP/s: data sheet).",
        f"Assumed bandwidth of a GPU in one direction: {cluster.bandwidth / 1e9:g} GB/s in a node of "
        f"{cluster.gpus_per_node}, {cluster.network / 1e9:g} GB/s between nodes.",
    ]


def mesh_table(title: str, choices: list[MeshChoice]) -> str:
    """Return one line for each number of GPUs."""
    from regard.terminal import format_bytes, format_table

    header = ("GPUs", "mesh", "rows", "accumulate", "checkpointing", "memory", "step", "tokens/s", "MFU")
    cells = [
        (
            *(f"{one.mesh.gpus:,}", str(one.mesh), f"{one.rows:,}", f"{one.work.accumulate:,}"),
            "yes" if one.work.activation_checkpointing else "no",
            format_bytes(one.peak_memory) + ("" if one.fits else ": too much"),
            *(f"{one.seconds:.4g} s", f"{one.tokens_per_second:,.0f}", f"{one.mfu:.1%}"),
        )
        for one in (choice.chosen for choice in choices)
    ]
    one = choices[0].chosen
    head = f"{title}, rows of {one.work.length:,} tokens, on {one.cluster.gpu.name}. {NOTHING_RAN}"
    return "\n\n".join([head, "\n".join(format_table([header, *cells], 2)), "\n".join(assumed_lines(one))])
