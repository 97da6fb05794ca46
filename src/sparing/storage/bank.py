"""Banks: where the clients' state lives between the rounds they take part in.

A client's state is one row of a Tree. A bank is made from the row of a client never met (the template, leaves
`[1, ...]`) and hands out rows `[K, ...]`; only clients that were written take space. `MemoryBank` keeps the rows on
a device, or in the memory of its host, `SlotBank` (in `slot_file`) in a file. Both take part in a checkpoint in
the same three steps:

    saved = bank.state()          # tensors for the checkpoint file
    save_checkpoint(path, saved, meta)  # durably in place ...
    bank.committed()              # ... so what only the checkpoint before needed may go

    >>> bank = MemoryBank({"residual": torch.zeros(1, 2)}, clients=1_000_000)
    >>> bank.write(torch.tensor([7]), {"residual": torch.ones(1, 2)})
    >>> bank.read(torch.tensor([7, 8]))["residual"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import CheckpointError, MethodError
from sparing.core.operation import operation
from sparing.core.ops import to_host
from sparing.core.tree import Tree, prefixed, take_rows, under

RESERVED = 1 << 30
"""Bytes of address space that a bank in a host's memory begins with; growing copies it."""


class Shard(NamedTuple):
    """The clients of which one bank of several holds the rows."""

    part: int = 0
    parts: int = 1

    def holds(self, ids: Tensor) -> Tensor:
        """
        >>> Shard(1, 3).holds(torch.arange(6)).tolist()
        [False, True, False, False, True, False]
        """
        return ids % self.parts == self.part


ALL_CLIENTS = Shard()


class Bank(Protocol):
    template: Tree

    def read(self, ids: Tensor) -> Tree:
        """Rows `[K, ...]` of clients `ids`, the caller's to change."""
        ...

    def write(self, ids: Tensor, rows: Tree) -> None:
        """Replaces the rows of clients `ids`; a leaf `[1, ...]` is given to each of them."""
        ...

    def mix(self, ids: Tensor, weight: Tensor) -> Tree:
        """Weighted sums of the rows of clients `ids`: `[K, m]` -> leaves `[K, ...]`; zeros cost nothing."""
        ...

    def state(self) -> Tree:
        """What a checkpoint needs to bring back every row as it is now. Save it before the next `write`."""
        ...

    def committed(self) -> None:
        """The checkpoint holding the last `state()` is durably in place."""
        ...

    def restore(self, saved: Tree, shard: Shard = ALL_CLIENTS) -> None:
        """Every row of these clients as it was when `state()` gave `saved`."""
        ...

    def close(self) -> None: ...


def open_bank(
    template: Tree,
    clients: int,
    device: torch.device | str = "cpu",
    path: str | Path | None = None,
    home: str | None = None,
    shard: Shard = ALL_CLIENTS,
) -> Bank:
    """Rows in the slot file `path`, or in the memory of `home`, else of `device`; read onto `device`.

    Banks of the same rows, of other clients, have files beside that one: see `slot_file.shard_path`.
    """
    if path is None:
        return MemoryBank(template, clients, device, home)
    from sparing.storage.slot_file import SlotBank  # needs POSIX files, which a run in memory does not

    return SlotBank(path, template, clients, device, shard.part)


class MemoryBank:
    """Rows in arrays that grow, on the device that reads them or, where they are too many for it, at `home`.

    Row 0 is the template, so client -> row 0 means never written. Rows on their way home are waited for by whoever
    asks for some next, so that the device goes on meanwhile.
    """

    def __init__(
        self, template: Tree, clients: int, device: torch.device | str = "cpu", home: torch.device | str | None = None
    ):
        self.template = check_template(template)
        self.clients = clients
        self.device = torch.device(device)
        self.home = self.device if home is None else torch.device(home)
        self.clear()

    def clear(self) -> None:
        self.row_of = np.zeros(self.clients, np.int64)  # pages of zeros: no memory until a client is written
        self.used = 1
        self.rows = {name: x.to(self.home, copy=True) for name, x in self.template.items()}
        self.asked: tuple[Tensor, int, np.ndarray] | None = None
        self.coming: list[
            tuple[Tensor, Tensor, Callable[[], list[Tensor]]]
        ] = []  # rows, which of them, their new values

    def read(self, ids: Tensor) -> Tree:
        if not self.template:
            return {}
        self.settle()
        index = self.index(self.who(ids))
        if self.home == self.device:
            return {name: x.index_select(0, index) for name, x in self.rows.items()}
        return {name: _send_rows(x, index, self.device) for name, x in self.rows.items()}

    def settle(self) -> None:
        """All that is coming is put where it belongs."""
        for rows, index, values in self.coming:
            rows.index_copy_(0, index, values()[0])
        self.coming = []

    def who(self, ids: Tensor) -> np.ndarray:
        """These clients, checked; who is read is soon written, and then the device is not waited for again."""
        if self.asked is None or self.asked[0] is not ids or self.asked[1] != ids._version:
            self.asked = ids, ids._version, check_client_ids(ids, self.clients)
        return self.asked[2]

    def index(self, client: np.ndarray) -> Tensor:
        return torch.from_numpy(self.row_of[client]).to(self.home, non_blocking=True)

    def write(self, ids: Tensor, rows: Tree) -> None:
        if not self.template and not rows:
            return
        client = self.who(ids)
        rows = check_rows(rows, self.template, len(client))
        self.settle()
        new = client[self.row_of[client] == 0]
        self.grow(self.used + len(new))
        self.row_of[new] = np.arange(self.used, self.used + len(new))
        self.used += len(new)
        index = self.index(client)
        for name, x in rows.items():
            if x.device.type != "cpu" and self.home.type == "cpu":
                self.coming.append((self.rows[name], index, to_host([x])))
            else:
                put_rows(self.rows[name], index, x.to(self.home))

    def mix(self, ids: Tensor, weight: Tensor) -> Tree:
        self.settle()
        client = check_client_ids(ids, self.clients)
        mixed = mix_rows(self.rows, self.row_of[client], weight)
        return {name: x.to(self.device) for name, x in mixed.items()}

    def grow(self, need: int) -> None:
        have = next(iter(self.rows.values())).shape[0]
        if need <= have:
            return
        size = min(self.clients + 1, max(need, have * 3 // 2, self.ahead))
        try:
            self.move_to(size)
        except RuntimeError:  # address space may be limited too
            size = min(self.clients + 1, max(need, have * 3 // 2))
            self.move_to(size)

    def move_to(self, size: int) -> None:
        """So many rows each, leaf by leaf: never the whole bank twice."""
        for name, x in self.rows.items():
            bigger = torch.empty(size, *x.shape[1:], dtype=x.dtype, device=x.device)
            bigger[: self.used] = x[: self.used]
            self.rows[name] = bigger

    @property
    def ahead(self) -> int:
        """Rows that there is room for from the first one on: pages of a host take memory once they are used."""
        if self.home.type != "cpu" or torch.are_deterministic_algorithms_enabled():  # then torch fills what is empty
            return 0
        return RESERVED // max(sum(x.nbytes for x in self.template.values()), 1)

    def state(self) -> Tree:
        """The written rows, as views of the bank, and whose they are."""
        if not self.template:
            return {}
        self.settle()
        ids = np.flatnonzero(self.row_of)
        ids = ids[np.argsort(self.row_of[ids])]
        return {"ids": torch.from_numpy(ids)} | prefixed("rows", {n: x[1 : self.used] for n, x in self.rows.items()})

    def committed(self) -> None:
        pass

    def restore(self, saved: Tree, shard: Shard = ALL_CLIENTS) -> None:
        check_saved_names(saved, {"ids", *prefixed("rows", self.template)} if self.template else set())
        self.clear()
        ids = saved.get("ids", torch.empty(0, dtype=torch.int64))
        here, rows = shard.holds(ids).nonzero()[:, 0], under("rows", saved)
        try:
            self.write(ids[here], rows if len(here) == len(ids) else take_rows(rows, here))
        except MethodError as error:
            raise CheckpointError(f"the checkpoint's client state does not fit this run: {error}") from error

    def close(self) -> None:
        self.clear()


def _send_rows(x: Tensor, index: Tensor, device: torch.device) -> Tensor:
    """Rows of a tensor on the host, on their way to a device: gathered where it can fetch them by itself."""
    if device.type != "cuda":
        return x.index_select(0, index).to(device)
    some = torch.empty(len(index), *x.shape[1:], dtype=x.dtype, pin_memory=True)
    torch.index_select(x, 0, index, out=some)
    return some.to(device, non_blocking=True)


def check_template(template: Tree) -> Tree:
    """The template on the CPU, copied; every leaf must be `[1, ...]`."""
    for name, x in template.items():
        if x.dim() == 0 or x.shape[0] != 1:
            raise MethodError(
                f"client state {name!r} starts as {list(x.shape)}; the row of a client never met must be [1, ...]"
            )
    return {name: x.detach().to("cpu", copy=True) for name, x in template.items()}


def check_client_ids(ids: Tensor, clients: int) -> np.ndarray:
    """Client ids as int64 numbers: existing clients, each once."""
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise MethodError(f"client ids must be whole numbers [K], not {ids.dtype} {list(ids.shape)}")
    client = ids.detach().cpu().numpy().astype(np.int64)
    strange = client[(client < 0) | (client >= clients)]
    if len(strange):
        raise MethodError(f"there is no client {strange[0]}; this run has clients 0 to {clients - 1}")
    ordered = np.sort(client)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise MethodError(f"client {twice[0]} is asked for twice at once; name each client of a cohort once")
    return client


def check_rows(rows: Tree, template: Tree, k: int) -> Tree:
    """Rows `[k, ...]` with the names, shapes and dtypes of the template; shared leaves shown to all k."""
    if rows.keys() != template.keys():
        raise MethodError(f"client state must keep its names: {sorted(template)} were set up, {sorted(rows)} came back")
    for name, x in rows.items():
        first = template[name]
        if (
            x.dtype != first.dtype
            or x.dim() != first.dim()
            or x.shape[1:] != first.shape[1:]
            or x.shape[0] not in (1, k)
        ):
            raise MethodError(
                f"client state {name!r} must come back as {first.dtype} {[k, *first.shape[1:]]}, "
                f"not {x.dtype} {list(x.shape)}"
            )
    return {name: x.detach().expand(k, *x.shape[1:]) for name, x in rows.items()}


def check_saved_names(saved: Tree, names: set[str]) -> None:
    """A checkpoint of another method, another kind of bank or an older release may have other names in it."""
    if saved.keys() != names:
        raise CheckpointError(
            f"the checkpoint holds client state {sorted(saved)} where this run needs {sorted(names)}; "
            "resume with the method, the kind of bank (memory or disk) and the release that it was saved with"
        )


@operation
def put_rows(rows: Tensor, index: Tensor, new: Tensor) -> None:
    """rows[index] = new."""
    rows.index_copy_(0, index, new)


@operation
def mix_rows(rows: Tree, index: np.ndarray, weight: Tensor) -> Tree:
    """Weighted sums of some rows, `[K, m]` -> leaves `[K, ...]`, added up in their order."""
    out = {n: torch.zeros(len(weight), *x.shape[1:], dtype=x.dtype, device=x.device) for n, x in rows.items()}
    for k, row in enumerate(weight.double().cpu()):
        for m in row.nonzero()[:, 0].tolist():
            for name, x in out.items():
                x[k].add_(rows[name][int(index[m])], alpha=float(row[m]))
    return out
