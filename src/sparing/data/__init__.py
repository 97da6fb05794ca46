"""Datasets by name, from where people get them: `load_dataset("mnist")`, `load_dataset("npz:my/clients")`.

Files are looked for in the folder `SPARING_DATA` and in the cache folder `~/.cache/sparing`; nothing is downloaded
behind anyone's back. A missing dataset says which command fetches it.
"""

from typing import TYPE_CHECKING

from sparing.core.lazy import lazy_names

if TYPE_CHECKING:
    from sparing.data.registry import known_datasets, load_dataset, register_dataset
    from sparing.data.sets.digits import digits_tensors

__all__ = ["digits_tensors", "known_datasets", "load_dataset", "register_dataset"]

__getattr__ = lazy_names(
    __name__,
    {
        "digits_tensors": "sparing.data.sets.digits",
        "known_datasets": "sparing.data.registry",
        "load_dataset": "sparing.data.registry",
        "register_dataset": "sparing.data.registry",
    },
)
