"""The slot file: clients' rows on disk, in records of one size, safe against a crash without ever being copied.

New rows go to free slots only, never over a record that a checkpoint may refer to; the checkpoint holds the table
client -> slot, and becomes valid by one rename. So at every moment there is one valid table, and its records are
untouched. Slots that only the table before referred to are free once `committed()` says that the new one stands.

A CRC-32 of each record is kept with the table, so a record altered on disk is noticed when it is read. Records are
read and written by offset, not mapped, so the memory in use is that of the rows asked for. POSIX only.

    >>> import tempfile
    >>> bank = SlotBank(tempfile.mkdtemp() + "/clients.slots", {"residual": torch.zeros(1, 2)}, clients=1_000_000)
    >>> bank.write(torch.tensor([7]), {"residual": torch.ones(1, 2)})
    >>> bank.read(torch.tensor([7, 8]))["residual"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
"""

import hashlib
import os
import weakref
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import CheckpointError, MethodError
from sparing.core.tree import Tree
from sparing.storage.atomic import read_at, sync_folder, write_at
from sparing.storage.bank import ALL_CLIENTS, Shard, check_client_ids, check_rows, check_saved_names, check_template
from sparing.storage.weighted_sums import open_readers, read_record, weighted_sums

_STAGE_BYTES = 8 << 20
"""Bytes of records put together in memory before they are written, or cut up after they were read."""
_LONG_RECORD = 1 << 20
"""Bytes of a record beyond which every leaf goes straight to its place, and from there."""


class SlotBank:
    """Rows in a file. Slots count from 1: client -> slot 0 means never written.

    A slot is `kept` while a table given to a checkpoint since the last commit, or committed by it, refers to it. A
    row whose slot is not kept yet is overwritten in place, so the file holds at most each written client once, and
    once more each client written since the last commit.
    """

    def __init__(
        self, path: str | Path, template: Tree, clients: int, device: torch.device | str = "cpu", file: int = 0
    ):
        self.first_path, self.file = Path(path), file
        self.path = shard_path(self.first_path, file)
        self.left_over: list[Path] = []  # files of banks that there are no more, once no checkpoint refers to them
        self.template = check_template(template)
        self.clients = clients
        self.device = torch.device(device)
        self.widths = {name: x.numel() * x.element_size() for name, x in self.template.items()}
        self.size = sum(self.widths.values())
        self.long = self.size > _LONG_RECORD
        staged = max(1, _STAGE_BYTES // self.size) if self.size else 0
        self.stage = np.empty((staged, self.size), np.uint8)
        self.fd = -1
        self.shut = lambda: None
        self.set_table(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint32))

    def set_table(self, ids: np.ndarray, slots: np.ndarray, crc: np.ndarray) -> None:
        self.last = int(slots.max(initial=0))
        self.slot_of = np.zeros(self.clients, np.int64)  # pages of zeros: no memory until a client is written
        self.slot_of[ids] = slots
        self.crc = np.zeros(self.last + 1, np.uint32)
        self.crc[slots] = crc
        self.kept, self.sure = np.zeros(self.last + 1, bool), np.zeros(self.last + 1, bool)
        self.given = slots
        self.committed()

    def read(self, ids: Tensor) -> Tree:
        client = check_client_ids(ids, self.clients)
        out = {name: x.repeat(len(client), *[1] * (x.dim() - 1)) for name, x in self.template.items()}
        slots = self.slot_of[client]
        order = np.argsort(slots)
        order = order[slots[order] > 0]
        columns = _leaf_bytes(out)
        for row in order if self.long else ():
            self.load_record(
                [column[row].numpy().data for column in columns.values()], int(slots[row]), int(client[row])
            )
        for rows in () if self.long else _index_batches(order, len(self.stage)):
            self.load(slots[rows], client[rows])
            index = torch.from_numpy(rows)
            for name, part in self.parts(len(rows)).items():
                columns[name][index] = part
        return {name: x.to(self.device) for name, x in out.items()}

    def write(self, ids: Tensor, rows: Tree) -> None:
        client = check_client_ids(ids, self.clients)
        rows = check_rows(rows, self.template, len(client))
        if not self.size or not len(client):
            return
        if self.fd < 0:
            self.open(fresh=self.last == 0)
        slots = self.slots_for(client)
        order = np.argsort(slots)
        if self.long:
            columns = _leaf_bytes({name: x.cpu() for name, x in rows.items()})
            for row in order:
                self.store_record([column[row].numpy().data for column in columns.values()], int(slots[row]))
        else:
            for part in _index_batches(order, len(self.stage)):
                self.stage_rows(rows, part)
                self.store(slots[part])
        self.slot_of[client] = slots

    def stage_rows(self, rows: Tree, part: np.ndarray) -> None:
        index = torch.from_numpy(part)
        chosen = _leaf_bytes({name: x[index.to(x.device)].cpu() for name, x in rows.items()})
        for name, column in self.parts(len(part)).items():
            column.copy_(chosen[name])

    def mix(self, ids: Tensor, weight: Tensor) -> Tree:
        """As the bank in memory does it, to the bit, a few rows in memory at a time.

        Checksums are compared once, and not of rows that this process wrote: they cost more than the sums.
        """
        if self.fd >= 0 and all(x.dtype == torch.float32 for x in self.template.values()):
            return self.mix_floats(check_client_ids(ids, self.clients), weight.double().cpu().numpy())
        used = (weight != 0).any(0).nonzero()[:, 0]
        out = {name: x.repeat(len(weight), *[1] * (x.dim() - 1)).zero_() for name, x in self.template.items()}
        for part in used.split(max(1, len(self.stage))):
            rows = self.read(ids[part.cpu()])
            for m, who in enumerate(part.tolist()):
                for k in weight[:, who].nonzero()[:, 0].tolist():
                    for name, x in out.items():
                        x[k].add_(rows[name][m].cpu(), alpha=float(weight[k, who]))
        return {name: x.to(self.device) for name, x in out.items()}

    def mix_floats(self, client: np.ndarray, weight: np.ndarray) -> Tree:
        used = weight.any(0)
        client, weight = client[used], weight[:, used]
        slots = self.slot_of[client]
        order = np.argsort(slots)
        for part in _index_batches(order[~self.sure[slots[order]] & (slots[order] > 0)], len(self.stage)):
            self.load(slots[part], client[part])
            self.sure[slots[part]] = True
        never = torch.cat([x.reshape(-1) for x in self.template.values()]).numpy()

        def read(m: int, columns: slice, room: np.ndarray) -> np.ndarray:
            if not slots[m]:
                return never[columns]
            start = (int(slots[m]) - 1) * self.size + 4 * columns.start
            found = read_record(opening(start), room, start, 4 * (columns.stop - columns.start))
            if found is None:
                raise self.altered(client[m], slots[m])
            return found.view(np.float32)

        try:
            with open_readers(self.path, self.fd, len(slots) * self.size) as opening:
                sums = weighted_sums(read, len(never), weight, torch.get_num_threads())
        except OSError as error:
            raise self.refused("cannot be read", error) from error
        parts = sums.split([x.numel() for x in self.template.values()], dim=1)
        named = zip(self.template.items(), parts, strict=True)
        return {name: part.reshape(len(weight), *x.shape[1:]).to(self.device) for (name, x), part in named}

    def slots_for(self, client: np.ndarray) -> np.ndarray:
        """Where these clients' new rows go: in place where no checkpoint minds, else the lowest free slots."""
        slots = self.slot_of[client]
        moves = (slots == 0) | self.kept[slots]
        need = int(moves.sum())
        fresh = max(0, need - len(self.free))
        slots[moves] = np.concatenate([self.free[:need], np.arange(self.last + 1, self.last + 1 + fresh)])
        self.free = self.free[need:]
        self.last += fresh
        if self.last >= len(self.crc):
            room = (self.last + 1) * 3 // 2 - len(self.crc)
            self.crc, self.kept, self.sure = (np.pad(x, (0, room)) for x in (self.crc, self.kept, self.sure))
        return slots

    def parts(self, rows: int) -> dict[str, Tensor]:
        """The staged records cut into their leaves: name -> bytes `[rows, width]`."""
        staged = torch.from_numpy(self.stage[:rows])
        return dict(zip(self.widths, staged.split(list(self.widths.values()), dim=1), strict=True))

    def store(self, slots: np.ndarray) -> None:
        """Writes the staged records to ascending slots."""
        self.crc[slots] = [zlib.crc32(row.data) for row in self.stage[: len(slots)]]
        self.sure[slots] = True
        try:
            for start, end in _slot_stretches(slots):
                write_at(self.fd, self.stage[start:end].reshape(-1).data, (int(slots[start]) - 1) * self.size)
        except OSError as error:
            raise self.refused("cannot be written", error) from error

    def store_record(self, leaves: list[memoryview], slot: int) -> None:
        """Writes the leaves of one client."""
        crc, at = 0, (slot - 1) * self.size
        try:
            for leaf in leaves:
                crc = zlib.crc32(leaf, crc)
                write_at(self.fd, leaf, at)
                at += len(leaf)
        except OSError as error:
            raise self.refused("cannot be written", error) from error
        self.crc[slot], self.sure[slot] = crc, True

    def load_record(self, leaves: list[memoryview], slot: int, who: int) -> None:
        """Reads the leaves of one client and checks them."""
        crc, at = 0, (slot - 1) * self.size
        try:
            for leaf in leaves:
                found = read_at(self.fd, leaf, at)
                leaf[found:] = bytes(len(leaf) - found)  # the file ends early: the checksum tells
                crc = zlib.crc32(leaf, crc)
                at += len(leaf)
        except OSError as error:
            raise self.refused("cannot be read", error) from error
        if crc != self.crc[slot]:
            raise self.altered(who, slot)

    def load(self, slots: np.ndarray, client: np.ndarray) -> None:
        """Reads ascending slots into the stage and checks them."""
        try:
            for start, end in _slot_stretches(slots):
                out = self.stage[start:end].reshape(-1).data
                found = read_at(self.fd, out, (int(slots[start]) - 1) * self.size)
                out[found:] = bytes(len(out) - found)  # the file ends early: the checksum tells
        except OSError as error:
            raise self.refused("cannot be read", error) from error
        for row, slot, who in zip(self.stage, slots, client, strict=False):
            if zlib.crc32(row.data) != self.crc[slot]:
                raise self.altered(who, slot)

    def state(self) -> Tree:
        """The table client -> (slot, checksum), once the rows it refers to are durable."""
        if not self.size:
            return {}
        try:
            if self.fd >= 0:
                os.fsync(self.fd)
        except OSError as error:
            raise self.refused("cannot be made durable", error) from error
        ids = np.flatnonzero(self.slot_of)
        self.given = self.slot_of[ids]
        self.kept[self.given] = True
        return {
            "ids": torch.from_numpy(ids),
            "slots": torch.from_numpy(self.given.copy()),
            "crc": torch.from_numpy(self.crc[self.given].astype(np.int64)),
            "layout": _record_fingerprint(self.template),
        }

    def committed(self) -> None:
        self.kept[:] = False
        self.kept[self.given] = True
        taken = self.kept[: self.last + 1].copy()
        taken[self.slot_of[self.slot_of > 0]] = True
        taken[0] = True
        self.free = np.flatnonzero(~taken)
        for path in self.left_over:
            path.unlink(missing_ok=True)
        self.left_over = []

    def restore(self, saved: Tree, shard: Shard = ALL_CLIENTS) -> None:
        """Rows may lie in the files of several banks (`files`). Those that are to lie here are copied into this one,
        beside its own, none of which is touched before the next checkpoint."""
        names = {"ids", "slots", "crc", "layout"} if self.size else set()
        check_saved_names(saved, names | ({"files"} if self.size and "files" in saved else set()))
        if not self.size:
            return
        if not torch.equal(saved["layout"], _record_fingerprint(self.template)):
            raise CheckpointError(
                f"the rows in {self.path} have other names, shapes or dtypes than this run's client state; "
                "resume with the model and the method that wrote them"
            )
        try:
            ids = check_client_ids(saved["ids"], self.clients)
        except MethodError as error:
            raise CheckpointError(f"the checkpoint's client state does not fit this run: {error}") from error
        slots, crc = saved["slots"].numpy().copy(), saved["crc"].numpy().astype(np.uint32)
        files = saved["files"].numpy() if "files" in saved else np.zeros_like(ids)
        mine = files == self.file
        self._restore_table(ids[mine], slots[mine], crc[mine])
        moved = shard.holds(torch.from_numpy(ids)).numpy()
        self.slot_of[ids[mine & ~moved]] = 0
        for file in np.unique(files[moved & ~mine]).tolist():
            other, some = SlotBank(self.first_path, self.template, self.clients, file=file), moved & (files == file)
            other._restore_table(ids[some], slots[some], crc[some])
            for part in _index_batches(ids[some], len(self.stage)):
                self.write(torch.from_numpy(part), other.read(torch.from_numpy(part)))
            other.close()
        if shard.part == 0:
            found = (shard_path(self.first_path, file) for file in np.unique(files).tolist() if file >= shard.parts)
            self.left_over = list(found)

    def _restore_table(self, ids: np.ndarray, slots: np.ndarray, crc: np.ndarray) -> None:
        if len(slots):
            self.open(fresh=False, need=int(slots.max()) * self.size)
        self.set_table(ids, slots, crc)

    def open(self, fresh: bool, need: int = 0) -> None:
        """Opens the file, emptied where a fresh run begins. Whoever opens it holds the lock of its folder."""
        self.close()
        try:
            self.fd = os.open(self.path, os.O_RDWR | (os.O_CREAT if fresh else 0), 0o666)
            self.shut = weakref.finalize(self, os.close, self.fd)
            if fresh:
                os.ftruncate(self.fd, 0)
                sync_folder(self.path.parent)
            found = os.fstat(self.fd).st_size
        except OSError as error:
            self.close()
            raise self.refused("cannot be opened", error) from error
        if found < need:
            self.close()
            raise CheckpointError(
                f"{self.path} has {found} bytes where the checkpoint refers to {need}; "
                "bring back the file that belongs to the checkpoint, or start the run afresh"
            )

    def close(self) -> None:
        self.shut()
        self.fd = -1

    def altered(self, who: int, slot: int) -> CheckpointError:
        return CheckpointError(
            f"the row of client {who} in {self.path} (slot {slot}) was altered after it was written; "
            "bring back the file that belongs to the last checkpoint, or start the run afresh"
        )

    def refused(self, what: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the clients' rows in {self.path} {what} ({error.strerror}); "
            "check the folder and its free space, then resume from the last checkpoint"
        )


def shard_path(path: Path, file: int) -> Path:
    """The file of one of several banks of the same rows.

    >>> str(shard_path(Path("run/clients.slots"), 0)), str(shard_path(Path("run/clients.slots"), 2))
    ('run/clients.slots', 'run/clients-2.slots')
    """
    return path.with_name(f"{path.stem}-{file}{path.suffix}") if file else path


def _leaf_bytes(tree: Tree) -> dict[str, Tensor]:
    """Each leaf `[K, ...]` as its bytes `[K, width]`; a view where the leaf is contiguous."""
    return {name: x.reshape(x.shape[0], x.shape[1:].numel()).view(torch.uint8) for name, x in tree.items()}


def _index_batches(index: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(index), size or 1):
        yield index[start : start + size]


def _slot_stretches(slots: np.ndarray) -> Iterator[tuple[int, int]]:
    """Stretches of neighbouring slots, each read or written at once.

    >>> list(_slot_stretches(np.array([3, 4, 5, 9])))
    [(0, 3), (3, 4)]
    """
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    yield from pairwise(cuts)


def _record_fingerprint(template: Tree) -> Tensor:
    """A fingerprint of what a record holds and in which order: uint8 [16]."""
    text = repr([(name, str(x.dtype), tuple(x.shape)) for name, x in template.items()])
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()[:16]), dtype=torch.uint8)
