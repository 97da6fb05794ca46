"""Write the tables of design.md from the code: `python docs/design_tables.py`. A test says when they are old."""

import ast
import re
from pathlib import Path

from sparing.accel.install import BODIES

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "sparing"
PAGE = HERE / "design.md"
VOCABULARY = ("context", "parcel", "optimiser", "method")


def first_sentence(file: Path) -> str:
    words = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.])\s", words)[0].replace("|", "\\|")


def rows(head: str, lines: list[tuple[str, ...]]) -> str:
    table = [head, "|" + "---|" * (head.count("|") - 1), *("| " + " | ".join(line) + " |" for line in lines)]
    return "\n".join(table) + "\n"


def rooms() -> str:
    """Every package directly below sparing."""
    found = []
    for room in sorted(p for p in SOURCE.iterdir() if (p / "__init__.py").exists()):
        files = [p for p in room.rglob("*.py") if p.stat().st_size and p.name != "__init__.py"]
        found.append((f"`{room.name}/`", str(len(files)), first_sentence(room / "__init__.py")))
    return rows("| room | files | what is in it |", found)


def core_files() -> str:
    found = [
        (f"`{p.name}`", first_sentence(p)) for p in sorted((SOURCE / "core").glob("*.py")) if p.name != "__init__.py"
    ]
    return rows("| file | what is in it |", found)


def tuples() -> str:
    """The fields of every NamedTuple that parts are made of, and what they see."""
    found = []
    for name in VOCABULARY:
        for node in ast.parse((SOURCE / "core" / f"{name}.py").read_text()).body:
            if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "NamedTuple" for base in node.bases):
                fields = [
                    x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
                ]
                about = re.split(r"(?<=[.:;])\s", (ast.get_docstring(node) or "").replace("\n", " "))[0].rstrip(":;")
                found.append((f"`{node.name}`", f"`{name}`", ", ".join(fields), about))
    return rows("| name | in core | fields | what it is |", found)


def operations() -> str:
    """Every operation that has a faster body."""
    found = []
    for made, body in BODIES:
        place = made.plain.__module__.removeprefix("sparing.")
        words = (made.plain.__doc__ or "").strip().split("\n")[0]
        found.append((f"`{made.plain.__name__}`", f"`{place}`", f"`{body.__module__.removeprefix('sparing.')}`", words))
    return rows("| operation | plain in | faster in | what it does |", sorted(found, key=lambda row: (row[1], row[0])))


TABLES = {"rooms": rooms, "core files": core_files, "tuples": tuples, "operations": operations}


def page(text: str) -> str:
    """The page with every table written anew."""
    for name, made in TABLES.items():
        begin, end = f"<!-- {name}: written by docs/design_tables.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{made()}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
