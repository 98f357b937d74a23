"""Hooks of the documentation site (mkdocs.yml): pages that are generated, and formulas as MathML.

The home page is README.md, contributing.md and changelog.md are the files of the repository, and the pages of reference/ are
written from the code when the site is built, so that they cannot disagree with it.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, source in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=relative_links(text)))
    for name, make in (
        ("reference/index.md", reference_index),
        ("reference/settings.md", settings_page),
        ("reference/command-line.md", command_page),
        ("reference/python.md", python_page),
    ):
        files.append(File.generated(config, name, content=make()))
    return files


def relative_links(text: str) -> str:
    """Return the text of a file at the root of the repository with links that hold in docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r'(src=")docs/', r"\1", text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace formulas, $...$ and $$...$$ outside of code, by MathML, which browsers show without a script."""
    pieces = re.split(r"(^```.*?^```|`[^`\n]*`)", markdown, flags=re.M | re.S)
    return "".join(piece if i % 2 else with_mathml(piece) for i, piece in enumerate(pieces))


def on_page_content(html_text: str, page: Any, config: Any, files: Files) -> str:
    """Replace the formulas of a notebook, which reaches this hook as HTML, by MathML."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html_text
    pieces = re.split(r"(<(pre|code|script|style)\b.*?</\2>|<[^>]*>)", html_text, flags=re.S)
    # Splitting with two groups yields text, markup, name of the tag, text, ...: only every third piece is text.
    return "".join(with_mathml(piece) if i % 3 == 0 else piece for i, piece in enumerate(pieces) if i % 3 != 2)


def with_mathml(text: str) -> str:
    def mathml(formula: str, display: str) -> str:
        return convert(html.unescape(formula.strip()), display=display)

    text = re.sub(r"\$\$(.+?)\$\$", lambda found: mathml(found[1], "block"), text, flags=re.S)
    return re.sub(r"(?<![\\\w$])\$([^$\n]+?)\$(?!\w)", lambda found: mathml(found[1], "inline"), text)


# ---- reference -------------------------------------------------------------------------------------------------------


def reference_index() -> str:
    return """# Reference

These pages are generated from the code when the site is built.

- [Settings](settings.md): every setting of a recipe, the parts of models, and the shipped recipes.
- [Command line](command-line.md): every command and option.
- [Python](python.md): the functions and classes of `import regard`.
"""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    escaped = [tuple(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in escaped), ""]


def code(text: Any) -> str:
    return f"`{text}`" if str(text) != "" else ""


def settings_page() -> str:
    """Return the page of all settings, parts and shipped recipes."""
    import json

    import regard.models.architectures  # noqa: F401 (fills the registries)
    from regard.cli.settings_listing import TITLES, parts_named
    from regard.config import Config
    from regard.config.recipes import find_recipe, flatten, shipped_recipes
    from regard.config.registry import KINDS, PARTS, TABLES, help_of

    def rows(values: Any, where: str = "") -> list[tuple[str, ...]]:
        found = [
            (name, json.dumps(v, ensure_ascii=False), h + parts_named(name)) for name, v, h in flatten(values, where)
        ]
        return [(code(name), code(value), plain(help)) for name, value, help in found]

    lines = [
        "# Settings",
        "",
        "A recipe is a TOML file with these settings. On the command line each is `--section.name VALUE`, for example",
        "`--train.steps 2000`. `regard settings` prints this page, `regard settings NAME` a part of it.",
        "",
    ]
    sections = [section for section, value in vars(Config()).items() if not isinstance(value, str)]
    lines += ["## Run", "", *table(("setting", "default", "meaning"), rows(Config())[:2])]
    for section in sections:
        lines += [f"## {section}", "", (type(getattr(Config(), section)).__doc__ or "").split("\n")[0], ""]
        lines += table(("setting", "default", "meaning"), rows(getattr(Config(), section), f"{section}."))
    lines += [
        "## Parts of models",
        "",
        "A part has its settings in a table of its own, which exists where it is chosen.",
        "",
    ]
    for kind, parts in PARTS.items():
        fields = ", ".join(code(f"model.{field}") for field in KINDS[kind].fields)
        lines += [f"### {TITLES[kind].capitalize()}", "", f"Chosen by {fields}.", ""]
        lines += table(("name", "meaning"), [(code(name), plain(help_of(part))) for name, part in parts.items()])
        own = [
            row
            for name in parts
            if name in TABLES and TABLES[name].kind == kind
            for row in rows(TABLES[name].settings(), f"model.{name}.")
        ]
        lines += table(("setting", "default", "meaning"), own) if own else []
    lines += ["## Tables of architectures", ""]
    for name, entry in TABLES.items():
        if not entry.kind:
            lines += [f"### [model.{name}]", "", f"{entry.help} ({', '.join(entry.architectures)}).", ""]
            lines += table(("setting", "default", "meaning"), rows(entry.settings(), f"model.{name}."))
    lines += ["## Shipped recipes", "", "`regard train NAME` trains one, `regard settings NAME` prints it.", ""]
    first = {name: find_recipe(name).read_text(encoding="utf-8").partition("\n")[0] for name in shipped_recipes()}
    lines += table(
        ("recipe", "what it trains"), [(code(name), plain(text.removeprefix("# "))) for name, text in first.items()]
    )
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return a help text without characters that Markdown would take for markup."""
    return re.sub(r"([*_<>\[\]])", r"\\\1", text).replace("$", "&#36;")


def command_page() -> str:
    """Return the page of all commands with their options."""
    import typer

    from regard.cli.main import PANELS, app

    root = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 a bug in Regard, 2 an error",
        "that you can fix, which is one line on stderr, 130 or 143 stopped by a signal.",
        "",
    ]
    for panel, commands in PANELS.items():
        lines += [f"## {panel}", ""]
        for name, _, sections in commands:
            lines += describe_command(root.commands[name], f"regard {name}", sections)  # type: ignore[attr-defined]
    return "\n".join(lines)


def describe_command(command: Any, path: str, sections: tuple[str, ...] = (), level: int = 3) -> list[str]:
    """Return the help of a command, and of its subcommands below it."""
    lines = [f"{'#' * level} {path}", ""]
    for paragraph in (command.help or "").split("\n\n"):
        lines += ["```", paragraph, "```", ""] if paragraph.startswith("regard ") else [plain_but_code(paragraph), ""]
    rows = []
    for parameter in command.params:
        if "--help" in parameter.opts:
            continue
        names = ", ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))
        help = getattr(parameter, "help", None) or ""
        default = parameter.default if not callable(parameter.default) else ""
        shown = "" if default in (None, False, (), []) or parameter.required else code(default)
        rows.append(
            (names if parameter.param_type_name == "option" else code(parameter.name.upper()), shown, plain(help))
        )
    lines += table(("option", "default", "meaning"), rows) if rows else []
    for name, child in getattr(command, "commands", {}).items():
        lines += describe_command(child, f"{path} {name}", (), level + 1)
    return lines


def plain_but_code(text: str) -> str:
    """Return a help text whose `code` stays code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if i % 2 else plain(html.escape(piece, quote=False)) for i, piece in enumerate(pieces))


def python_page() -> str:
    """Return the page of the Python interface; mkdocstrings fills it from the docstrings."""
    import regard

    lines = ["# Python", "", "```python", "import regard", "```", ""]
    lines += ["Errors that you can fix are a `regard.RegardError`; arguments of a wrong type are a `TypeError`.", ""]
    order = ["translate", "load", "Translator", "Translation", "Generator", "Generation", "Classifier", "Prediction"]
    order += [
        "Embedder",
        "WordVectors",
        "identify_language",
        "Identification",
        "train",
        "resume",
        "record",
        "summary",
        "RegardError",
    ]
    assert sorted(order) == sorted(regard.__all__), "a name of the package is missing on the page"
    modules = {**regard._MODULES, "RegardError": "regard.errors"}
    for name in order:
        lines += [f"::: {modules[name]}.{name}", ""]
    return "\n".join(lines)
