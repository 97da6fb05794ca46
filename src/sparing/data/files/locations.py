"""Where the files of a dataset are looked for, and what to say when they are not there."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparing.core.errors import DataError


class FileForm(NamedTuple):
    """One form in which a dataset is passed around: these files, all in one of these folders.

    A folder is relative to `SPARING_DATA` and to the cache folder, unless absolute. A file may be a folder itself;
    `name[.gz]` means with or without that ending. `read(paths, **options)` gets the files in the order of `files`.
    """

    files: tuple[str, ...]
    folders: tuple[str, ...]
    read: Callable[..., Any]


def cache_folder() -> Path:
    """`~/.cache/sparing`, or where XDG_CACHE_HOME says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sparing"


def _search_roots() -> list[Path]:
    """The folders to look in: `SPARING_DATA` where it is set, then the cache."""
    own = os.environ.get("SPARING_DATA")
    return [Path(own).expanduser(), cache_folder()] if own else [cache_folder()]


def find_files(name: str, forms: Sequence[FileForm], fetch: str) -> tuple[FileForm, list[Path]]:
    """The first form whose files are all here, with their paths; otherwise a sentence that says how to get them."""
    lacking: list[str] = []
    for root in _search_roots():
        for form in forms:
            for folder in form.folders:
                found = {file: _existing_path(root / folder, file) for file in form.files}
                paths = [path for path in found.values() if path]
                if len(paths) == len(found):
                    return form, paths
                if paths and not lacking:
                    missing = ", ".join(file for file, path in found.items() if not path)
                    lacking = [f"{name}: {root / folder} lacks {missing}; fetch it with: {fetch_command(name, fetch)}"]
    raise DataError(lacking[0] if lacking else _absence_sentence(name, forms, fetch))


def _existing_path(folder: Path, file: str) -> Path | None:
    plain, *ending = file.removesuffix("]").split("[")
    for candidate in (plain, *(plain + end for end in ending)):
        if (folder / candidate).exists():
            return folder / candidate
    return None


def _absence_sentence(name: str, forms: Sequence[FileForm], fetch: str) -> str:
    looked = [f"{', '.join(form.files)} in {' or '.join(folder or '.' for folder in form.folders)}" for form in forms]
    below = " and ".join(map(str, _search_roots()))
    return (
        f"{name} is not on this machine: looked below {below} for {'; or for '.join(looked)}; "
        f"fetch it with: {fetch_command(name, fetch)}"
    )


def fetch_command(name: str, fetch: str) -> str:
    """The command that fetches a dataset to the first place that is looked at."""
    root = _search_roots()[0]
    return fetch.format(root=shlex.quote(str(root)), folder=shlex.quote(str(root / name)))


def curl_command(base: str, *files: str, folder: str = "{folder}") -> str:
    """A curl line that puts these files into a folder.

    >>> curl_command("https://example.org", "a.gz", "b.gz")
    "curl -fL --create-dirs --output-dir {folder} --remote-name-all 'https://example.org/{{a.gz,b.gz}}'"
    """
    what = files[0] if len(files) == 1 else "{{" + ",".join(files) + "}}"
    return f"curl -fL --create-dirs --output-dir {folder} --remote-name-all '{base}/{what}'"


def find_user_folder(kind: str, path: str) -> Path:
    """A folder that a user names: as given, or below `SPARING_DATA`."""
    tried = dict.fromkeys([Path(path).expanduser(), *(root / path for root in _search_roots()[:-1])])
    for folder in tried:
        if folder.is_dir():
            return folder.resolve()
    raise DataError(f"{kind}:{path}: there is no folder {' nor '.join(map(str, tried))}: give the path of a folder")
