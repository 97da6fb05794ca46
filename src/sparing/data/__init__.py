"""Datasets by name, from where people get them: `load_dataset("mnist")`, `load_dataset("npz:my/clients")`.

Files are looked for in the folder `SPARING_DATA` and in the cache folder `~/.cache/sparing`; nothing is downloaded
behind anyone's back. A missing dataset says which command fetches it.
"""

from sparing.data.registry import known_datasets, load_dataset, register_dataset
from sparing.data.sets.digits import digits_tensors

__all__ = ["digits_tensors", "known_datasets", "load_dataset", "register_dataset"]
