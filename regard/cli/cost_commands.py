"""`regard cost`: what a model costs in parameters, arithmetic and memory, before any of it is spent.

MERGED: `regard summary`: a model layer by layer.
"""

from __future__ import annotations

import json as jsons
import re
from typing import Annotated, Any

import typer

from regard.errors import RegardError
from regard.inference.model_spec import config_of
from regard.models.analysis.summary import check_lengths
from regard.terminal import format_bytes, format_table


def cost(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="A preset, a recipe, or a run or model folder; without any, lists the presets.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Training tokens, such as 300e9, 300B or 1.4T.")] = None,
    batch: Annotated[int, typer.Option(help="Rows at a time.")] = 1,
    length: Annotated[int | None, typer.Option(help="Tokens in a row; by default the model's longest.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count a model's parameters, FLOPs and memory; nothing is allocated, whatever its size.

    Model settings can be tried: --model.n_kv_heads 8, ...
    """
    from regard.cli.options import section_settings

    cost_command(name, section_settings(context, "model"), tokens, batch, length, json)


def cost_command(
    name: str | None, settings: dict[str, str], tokens: str | None, batch: int, length: int | None, as_json: bool
) -> None:
    if name is None and (settings or tokens is not None or length is not None or batch != 1):
        raise RegardError(
            "tokens, rows and settings belong to a model: give the name of a preset, a recipe or a folder"
        )
    if name is None:
        result: dict[str, Any] = {"presets": presets()}
        return print(jsons.dumps(result) if as_json else show_presets(result["presets"]))
    from regard.models.analysis.cost import report_costs

    config, assumed = config_of(name, settings)
    length = config.max_len if length is None else length
    check_lengths(config, batch, length)
    result = {"model": name, "assumed": assumed}
    result |= report_costs(config, batch, length, None if tokens is None else parse_tokens(tokens))
    print(jsons.dumps(result, ensure_ascii=False) if as_json else show(result))


def parse_tokens(text: str) -> int:
    """300e9, 300B, 1.4T, 20M, 5k -> a number."""
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d\d?)?)([kmbt]?)", text.replace(",", "").replace("_", "").lower())
    number = round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[found[2]]) if found else 0
    if number < 1:
        raise RegardError(f"--tokens is a number such as 300e9, 300B or 1.4T, not '{text}'")
    return number


def presets() -> list[dict[str, Any]]:
    from regard.models.analysis.cost import Cost
    from regard.models.architectures import PRESETS

    rows = []
    for name in PRESETS:
        config, assumed = config_of(name, {})
        cost = Cost(config)
        rows.append({"preset": name, "architecture": config.architecture, "blocks": cost.blocks})
        rows[-1] |= {
            "d_model": config.d_model,
            "n_heads": config.n_heads,
            "parameters": cost.parameters,
            "assumed": assumed,
        }
    return rows


# ---- as text ---------------------------------------------------------------------------------------------------------


def show_presets(rows: list[dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [("preset", "architecture", "blocks", "width", "heads", "parameters")]
    for row in rows:
        numbers = (f"{row[key]:,}" if row[key] else "-" for key in ("blocks", "d_model", "n_heads", "parameters"))
        cells.append((row["preset"], row["architecture"], *numbers))
    vocab = next((n for row in rows for field, n in row["assumed"].items() if "vocab" in field), None)
    note = [f"Where a vocabulary comes from the data, {vocab:,} pieces are counted."] if vocab else []
    return "\n".join(format_table(cells, 2) + note)


def show(result: dict[str, Any]) -> str:
    title = f"{result['model']} ({result['architecture']})"
    sections = [[title], show_parameters(result), show_flops(result), show_training(result), show_decoding(result)]
    notes = [f"model.{field} comes from the data: {n:,} assumed" for field, n in result["assumed"].items()]
    return "\n\n".join("\n".join(lines) for lines in [*sections, notes] if lines)


def show_parameters(result: dict[str, Any]) -> list[str]:
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


PARAMETERS = (
    "Counted on the model, which is built without numbers. Trained: all of them, what is tied once. Active: weights that",
    "one token is multiplied with; a look-up in an embedding is no product.",
)


def show_flops(result: dict[str, Any]) -> list[str]:
    found = result["flops"]
    rows = [
        ("forward", f"{found['forward_per_token']:.4g} a token"),
        ("training", f"{found['training_per_token']:.4g} a token"),
    ]
    if "tokens" in found:
        example = found["example"]
        days = f"{example['days']:,.1f} days on one {example['gpu']} at {example['mfu']:.0%} of its peak"
        rows.append((f"{found['tokens']:,} tokens", f"{found['training']:.4g}: {days}"))
    from regard.models.architectures import ARCHITECTURES

    kind = ARCHITECTURES[result["architecture"]]
    meaning = [BOTH_SIDES] if kind.translates else [PATCHES] if kind.sees_images else []
    return [f"FLOPs in rows of {result['length']:,} tokens", *format_table(rows, 2), *FLOPS, *meaning]


FLOPS = (
    "Counted while the model runs without numbers: a multiplication with its addition is 2, all products of matrices and",
    "nothing else; attention in full, masked or not; a backward pass is 2 forwards.",
)
BOTH_SIDES = "A token is one of the target with one of the source; rows are as long on both sides."
PATCHES = "A token is a patch, or the one that the class is read from."


def show_training(result: dict[str, Any]) -> list[str]:
    rows = [(name, format_bytes(n)) for name, n in result["memory"]["training"].items()]
    return [f"memory to train {result['batch']:,} x {result['length']:,} tokens", *format_table(rows, 1), *TRAINING]


TRAINING = (
    "fp32 weights and AdamW, products in bf16. Activations are an estimate: fused attention, nothing recomputed.",
)


def show_decoding(result: dict[str, Any]) -> list[str]:
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


def summary(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A run or model folder, a preset or a recipe; `regard cost` lists presets.")
    ],
    depth: Annotated[int, typer.Option(help="1 for stacks, 2 for their blocks, 3 for the sublayers of those.")] = 2,
    length: Annotated[int | None, typer.Option(help="Tokens in a row; by default the model's longest.")] = None,
    source_length: Annotated[int | None, typer.Option(help="Tokens of a source; by default as many.")] = None,
    batch: Annotated[int, typer.Option(help="Rows at a time.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the parameters, the FLOPs of a forward pass and the weights' bytes of every layer.

    The model runs without numbers, whatever its size. Model settings can be tried: --model.n_kv_heads 8, ...
    """
    from regard.cli.options import section_settings
    from regard.inference.model_spec import summary as summed

    settings = section_settings(context, "model")
    found = summed(model, batch=batch, length=length, source_length=source_length, depth=depth, settings=settings)
    print(jsons.dumps(found.to_dict(), ensure_ascii=False) if json else found)
