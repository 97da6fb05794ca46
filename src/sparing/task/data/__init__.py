"""Datasets by name, from where people get them: `load("mnist")`, `load("npz:my/clients")`.

Files are looked for in the folder `SPARING_DATA` and in the cache folder `~/.cache/sparing`; nothing is downloaded
behind anyone's back. A missing dataset says which command fetches it.
"""

from sparing.task.data.embedded import digits
from sparing.task.data.registry import dataset, known, load

__all__ = ["dataset", "digits", "known", "load"]
