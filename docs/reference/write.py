"""Write cli.md, api.md and methods.md beside this file, from the code itself: `python docs/reference/write.py`.

The table of names that the command line reads instead of the code (`sparing/runs/names.json`) is written with them.
"""

import ast
import importlib
import inspect
import textwrap
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from typer.main import get_command

from sparing.cli.app import app
from sparing.cli.pfllib_flags import _make_parser
from sparing.cli.wording import _default_text
from sparing.core.registry import known_recipes
from sparing.runs.known_names import NAMES_FILE, names_table, recipe_options

HERE = Path(__file__).parent
MADE = "<!-- written by docs/reference/write.py; change the code, not this page -->\n"

API = {
    "Train": ("sparing", ["run", "resume", "Task", "Result", "Record", "SparingError", "set_seed", "export"]),
    "Compare": (
        "sparing.reports.comparison",
        ["compare_groups", "Comparison", "ComparisonRow", "SeedStat", "BaselineGap"],
    ),
    "Find runs": ("sparing.reports.run_folders", ["find_run_folders", "read_run_folder", "group_runs"]),
    "Explain, before anything runs": ("sparing.runs.explanation", ["explain_method"]),
    "H5 files": ("sparing.reports.h5_files", ["write_h5", "write_h5_files"]),
    "Data": ("sparing.data", ["load_dataset", "register_dataset"]),
    "Splits": ("sparing.split", ["partition_dataset", "split_report"]),
    "Name a part": ("sparing.core.registry", ["recipe"]),
    "What a part is made of": (
        "sparing.core.method",
        [
            "Method",
            "Share",
            "Codec",
            "Effect",
            "View",
            "Weigh",
            "Step",
            "Serving",
            "Meter",
            "Arrival",
            "Blended",
            "Blend",
        ],
    ),
    "How clients train, in what size": (
        "sparing.core.method",
        ["Local", "Phase", "Wrap", "Lesson", "Trained", "Fit", "Resize"],
    ),
    "How a client's steps are taken": ("sparing.core.optimiser", ["Optimiser", "Schedule"]),
    "Who is asking": ("sparing.core.context", ["Ctx", "Federation", "Members"]),
    "What travels": ("sparing.core.parcel", ["Leaf", "Parcel", "Spec", "Schema", "Cut"]),
    "Put parts together": ("sparing.core.compose", ["compose", "narrow_share", "weighed_by"]),
    "Sums that do not depend on K": ("sparing.core.reduce", ["total", "largest_in_rows"]),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def cli() -> str:
    """Every command with its examples and options."""
    parts = [
        f"{MADE}# Command line\n\nEvery command has `--help`; `sparing --install-completion` sets up tab completion.\n"
    ]
    group: Any = get_command(app)
    for name, command in group.commands.items():
        words, _, examples = inspect.cleandoc(command.help or "").replace("\f", "").partition("\b\n")
        parts.append(f"## sparing {name}\n\n{words.strip()}\n")
        if examples:
            parts.append(f"```text\n{examples.rstrip()}\n```\n")
        rows = pfllib_rows() if name == "pfllib" else [row for p in command.params for row in rows_of(p)]
        if rows:
            parts.append(table(["option", "meaning"], rows))
    return "\n".join(parts)


def rows_of(param: Any) -> list[list[str]]:
    """A parameter as a row; `--help` needs none."""
    if param.name == "help":
        return []
    argument = param.param_type_name == "argument"
    name = param.metavar or param.name.upper() if argument else ", ".join(param.opts)
    usual = param.default
    quiet = argument or usual is None or callable(usual) or getattr(param, "is_flag", False) or "default:" in param.help
    return [[f"`{name}`", (param.help or "") + ("" if quiet else f" [default: {usual}]")]]


def pfllib_rows() -> list[list[str]]:
    shown = [action for action in _make_parser()._actions if action.help != SUPPRESS and action.dest != "help"]
    return [[f"`{', '.join(a.option_strings) or a.metavar}`", a.help or ""] for a in shown]


def methods() -> str:
    """Every recipe: what it does, its options with their defaults, its paper."""
    rows = []
    for entry in known_recipes().values():
        if entry.make.__module__.startswith("sparing."):
            said = ", ".join(f"{name}={_default_text(value)}" for name, value in recipe_options(entry).items())
            rows.append([f"`{entry.name}`", entry.about, f"`{said}`" if said else "", entry.paper])
    return f"{MADE}# All methods\n\nWhat `sparing methods` lists.\n\n" + table(
        ["name", "what it does", "options and defaults", "source"], rows
    )


def api() -> str:
    """The names to build on: functions by their heads, tuples and classes as they stand in the code."""
    parts = [f"{MADE}# Python\n"]
    for title, (module, names) in API.items():
        parts.append(f"## {title}\n\n`from {module} import {', '.join(names)}`\n")
        for name in names:
            parts.append(f"### {name}\n\n{described(getattr(importlib.import_module(module), name))}")
    return "\n".join(parts)


def described(thing: Any) -> str:
    """Its docstring, and its head (a function), its fields (a tuple) or its public methods (a class)."""
    node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    words = fenced(ast.get_docstring(node) or "")
    if isinstance(node, ast.FunctionDef):
        return f"```text\n{head(node)}\n```\n\n{words}\n"
    source = textwrap.dedent(inspect.getsource(thing)).splitlines()
    fields = [source[n.lineno - 1 : n.end_lineno] for n in node.body if isinstance(n, ast.AnnAssign)]
    lines = [line.strip() if len(field) == 1 else line for field in fields for line in field]
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and (inner.name == "__init__" or not inner.name.startswith("_")):
            said = (ast.get_docstring(inner) or "").split("\n")[0]
            lines += [head(inner), f"    {said}"] if said else [head(inner)]
    listed = "\n".join(line.replace("# noqa: RUF012  ", "# ") for line in lines)
    return f"{words}\n" + (f"\n```text\n{listed}\n```\n" if listed else "")


def head(node: ast.FunctionDef) -> str:
    inside = ast.unparse(node.args)
    if len(inside) >= 80:
        inside = "\n    " + ",\n    ".join(arguments(inside)) + ",\n"
    return f"{node.name}({inside}) -> {ast.unparse(node.returns)}" if node.returns else f"{node.name}({inside})"


def arguments(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    out, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            out.append("")
        else:
            out[-1] += letter
    return [word.strip() for word in out]


def fenced(words: str) -> str:
    """Examples of a docstring as a block."""
    before, mark, after = words.partition("\n>>>")
    if words.startswith(">>>"):
        before, mark, after = "", ">>>", words.removeprefix(">>>")
    return f"{before.rstrip()}\n\n```pycon\n{mark.strip()}{after}\n```".lstrip() if mark else words


PAGES = {"cli.md": cli, "methods.md": methods, "api.md": api}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (HERE / name).write_text(made(), encoding="utf-8")
    NAMES_FILE.write_text(names_table(), encoding="utf-8")
