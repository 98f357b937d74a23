"""`regard cost` and `regard summary`: parameters, FLOPs and memory of a model, in total and layer by layer."""

from __future__ import annotations

import json as jsons
import re
from typing import Annotated, Any

import typer

from regard.cli.options import Json, section_settings
from regard.errors import RegardError

Length = Annotated[int | None, typer.Option(help="Tokens in a row; by default the model's max_len.")]
Batch = Annotated[int, typer.Option(help="Number of rows in a batch.")]


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
    batch: Batch = 1,
    length: Length = None,
    json: Json = False,
) -> None:
    """Count a model's parameters, FLOPs and memory without allocating it.

    Model settings can be tried: --model.n_kv_heads 8, ...
    """
    settings = section_settings(context, "model")
    if name is None and (settings or tokens is not None or length is not None or batch != 1):
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
    check_lengths(config, batch, length)
    result = {"model": name, "assumed": assumed}
    result |= report_costs(config, batch, length, None if tokens is None else parse_tokens(tokens))
    print(jsons.dumps(result, ensure_ascii=False) if json else cost_report(result))


def parse_tokens(text: str) -> int:
    """Return the number that 300e9, 300B, 1.4T, 20M or 5k stands for."""
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d\d?)?)([kmbt]?)", text.replace(",", "").replace("_", "").lower())
    number = round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[found[2]]) if found else 0
    if number < 1:
        raise RegardError(f"--tokens is a number such as 300e9, 300B or 1.4T, not '{text}'")
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
    notes = [f"model.{field} comes from the data: {n:,} assumed" for field, n in result["assumed"].items()]
    return "\n\n".join("\n".join(lines) for lines in [[title], *tables, notes] if lines)


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
