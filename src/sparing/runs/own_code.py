"""Code that a study names, on its way into a run: trusted, shown, and kept beside what it gave."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from sparing.core.errors import ConfigError
from sparing.runs.study import Study
from sparing.storage.atomic import os_errors_as_checkpoint_error, write_atomic
from sparing.tasks.code import code_file, copy_name, untrusted_sentence
from sparing.tasks.trust import is_trusted, trust

CODE_FOLDER = "code"


class NamedCode(NamedTuple):
    """One entry of a study that names code, and one of the files that it runs."""

    key: str
    reference: str
    path: Path
    sha256: str


def code_of_study(study: Study, copies: Path | None = None) -> list[NamedCode]:
    files = {key: (call, code_file(call, copies)) for key, call in study.code().items()}
    return [NamedCode(key, call.reference, file.path, file.sha256) for key, (call, file) in files.items()]


def trust_code(study: Study, copies: Path | None = None) -> None:
    """What the study names may run from now on, as it is now."""
    for one in code_of_study(study, copies):
        trust(one.sha256, one.path)


def refuse_untrusted(study: Study, copies: Path | None = None) -> None:
    for call in study.code().values():
        file = code_file(call, copies)
        if not is_trusted(file.sha256):
            raise ConfigError(untrusted_sentence(call, file))


def code_digests(study: Study) -> dict[str, str]:
    """Of the files that the study names, as they are now: SHA-256 by place."""
    return {call.place: code_file(call).sha256 for call in study.code().values() if call.is_file}


def edited_since(study: Study, folder: Path) -> str | None:
    """A file that the study names and that is not, or no longer, as the run in this folder began with it."""
    for place, digest in code_digests(study).items():
        copy = folder / CODE_FOLDER / copy_name(place)
        if not copy.is_file() or hashlib.sha256(copy.read_bytes()).hexdigest() != digest:
            return place
    return None


def keep_copies(study: Study, folder: Path) -> None:
    """The files as they are now, in the run folder: whoever goes on with the run goes on with these."""
    for call in study.code().values():
        if call.is_file:
            path = folder / CODE_FOLDER / copy_name(call.place)
            with os_errors_as_checkpoint_error(path):
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, code_file(call).text)
