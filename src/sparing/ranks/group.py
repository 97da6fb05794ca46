"""The ranks of a run, as one of them sees them, and what passes between them: tensors and JSON, never code.

What is added up, or gathered by all, every rank must call for at the same point of the run. Where one of them is gone,
the others get a RankError in their next call.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from sparing.core.errors import ConfigError, RankError
from sparing.core.tree import Tree
from sparing.ranks.meeting import Meeting, first_line
from sparing.ranks.rank_place import RankPlace

_LONGEST_ROUND = timedelta(hours=24)
PIECE_BYTES = 64 << 20
"""That pass at a time."""
_NAMES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64"
_DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in _NAMES.split()}


class Ranks:
    """Processes that have met."""

    def __init__(self, meeting: Meeting, device: torch.device, direct: bool):
        self.rank, self.world, self.place = meeting.place.rank, meeting.place.world, meeting.place
        self.meeting, self.device = meeting, device
        self.direct = direct  # whether ranks exchange tensors of their GPUs themselves, and not by way of their hosts

    @property
    def is_first(self) -> bool:
        """The rank that writes files and talks to people."""
        return self.rank == 0

    # ----------------------------------------------------------------------------------------------------- by everyone

    def add_up(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks of tensors that every rank has, in the same shapes; they may be used up."""
        out: list[Tensor] = []
        for some in _in_pieces(list(tensors)):
            joined = torch.cat([x.reshape(-1) for x in some]) if len(some) > 1 else some[0].reshape(-1)
            held = joined if self.direct or joined.device.type == "cpu" else joined.cpu()
            with self.asking():
                dist.all_reduce(held)
            parts = held.to(joined.device).split([x.numel() for x in some])
            out += [part.view(x.shape) for part, x in zip(parts, some, strict=True)]
        return out

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's, by rank."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with self.asking():
            dist.all_gather(sizes, torch.tensor([len(data)]))
        lengths = [int(size) for size in sizes]
        whole = [bytearray() for _ in lengths]
        for start in range(0, max(lengths), PIECE_BYTES):
            room = min(PIECE_BYTES, max(lengths) - start)
            mine = torch.zeros(room, dtype=torch.uint8)
            part = data[start : start + room]
            if part:
                mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            theirs = [torch.empty_like(mine) for _ in lengths]
            with self.asking():
                dist.all_gather(theirs, mine)
            for held, x in zip(whole, theirs, strict=True):
                held += x.numpy().tobytes()
        return [bytes(held[:length]) for held, length in zip(whole, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def gather_trees(self, tree: Tree) -> list[Tree]:
        """Everybody's, by rank, on the host: for small ones."""
        return [_tree_of_bytes(data) for data in self.gather_bytes(_tree_bytes(tree))]

    def agreed(self, value: Any) -> Any:
        """The first rank's, as JSON gives it back."""
        return self.gather_json(value if self.is_first else None)[0]

    def said_by_first(self, tree: Tree) -> Tree:
        """The first rank's tensors, on the host, to everybody; `tree` of others is not looked at."""
        entries = self.agreed(_entries(tree) if self.is_first else None)
        out = {}
        for name, dtype, shape in entries:
            x = tree[name].cpu().contiguous() if self.is_first else torch.empty(shape, dtype=_DTYPES[dtype])
            for piece in _byte_pieces(x):
                with self.asking():
                    dist.broadcast(piece, 0)
            out[name] = x
        return out

    # -------------------------------------------------------------------------------------------------- to the first

    def bring_to_first(self, tree: Tree, take: Callable[[int, str, Tensor], None]) -> None:
        """Every rank's tensors, one after the other, to the first rank, where `take(rank, name, tensor)` gets them."""
        if self.is_first:
            for name, x in tree.items():
                take(0, name, x)
            for rank in range(1, self.world):
                for name, dtype, shape in self._listed(rank):
                    x = torch.empty(shape, dtype=_DTYPES[dtype])
                    for piece in _byte_pieces(x):
                        with self.asking():
                            dist.recv(piece, rank)
                    take(rank, name, x)
            return
        listing = torch.frombuffer(bytearray(json.dumps(_entries(tree)).encode()), dtype=torch.uint8)
        with self.asking():
            dist.send(torch.tensor([len(listing)]), 0)
            dist.send(listing, 0)
        for x in tree.values():
            for piece in _byte_pieces(x.cpu().contiguous()):
                with self.asking():
                    dist.send(piece, 0)

    def _listed(self, rank: int) -> list[tuple[str, str, list[int]]]:
        length = torch.zeros(1, dtype=torch.int64)
        with self.asking():
            dist.recv(length, rank)
        listing = torch.empty(int(length), dtype=torch.uint8)
        with self.asking():
            dist.recv(listing, rank)
        return json.loads(listing.numpy().tobytes())

    # ------------------------------------------------------------------------------------------------- who is there

    def wait_for_all(self) -> None:
        with self.asking():
            dist.barrier()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """What others are asked inside they may not answer any more."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(self.meeting.why_lost()) from error

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_ranks(meeting: Meeting, device: torch.device) -> Ranks:
    """Join the other ranks; `device` is this one's."""
    place, store = meeting.place, meeting.store
    if dist.is_initialized():
        raise ConfigError("torch.distributed is in use in this process already; let sparing open it")
    try:
        direct = _gpus_of_their_own(place, device, store)
        if direct and not dist.is_nccl_available():
            raise ConfigError("ranks with GPUs of their own add up by nccl, which this torch lacks; set device=cpu")
        backend, group = "cpu:gloo,cuda:nccl" if direct else "gloo", PrefixStore("sparing/group", store)
        dist.init_process_group(backend, store=group, rank=place.rank, world_size=place.world, timeout=_LONGEST_ROUND)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            meeting.last_words()
            or f"the {place.world} ranks cannot work together ({first_line(error)}); let their "
            "machines reach each other"
        ) from None
    return Ranks(meeting, device, direct)


def _gpus_of_their_own(place: RankPlace, device: torch.device, store: Store) -> bool:
    """Whether every rank has a GPU that no other rank has, as nccl wants it; all of them have one, or none has."""
    own = device.type == "cuda" and torch.cuda.device_count() >= place.local_world
    store.set(f"sparing/device/{place.rank}", f"{device.type} {int(own)}")
    said = [store.get(f"sparing/device/{rank}").decode().split() for rank in range(place.world)]
    without = [rank for rank, (kind, _) in enumerate(said) if kind == "cpu"]
    if without and len(without) < place.world:
        raise ConfigError(f"rank {without[0]} has no GPU, where others have; set device=cpu, or start it where one is")
    return all(own == "1" for _, own in said)


def _entries(tree: Tree) -> list[tuple[str, str, list[int]]]:
    return [(name, str(x.dtype), list(x.shape)) for name, x in tree.items()]


def _tree_bytes(tree: Tree) -> bytes:
    listing = json.dumps(_entries(tree)).encode()
    parts = [x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for x in tree.values()]
    return len(listing).to_bytes(8, "little") + listing + b"".join(parts)


def _tree_of_bytes(data: bytes) -> Tree:
    at = 8 + int.from_bytes(data[:8], "little")
    tree: Tree = {}
    for name, dtype, shape in json.loads(data[8:at]):
        x = torch.empty(shape, dtype=_DTYPES[dtype])
        size = x.numel() * x.element_size()
        if size:
            x.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8))
        tree[name], at = x, at + size
    return tree


def _in_pieces(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type together, as many as pass at a time."""
    some: list[Tensor] = []
    for x in tensors:
        full = some and sum(one.nbytes for one in some) + x.nbytes > PIECE_BYTES
        if some and (full or some[0].dtype != x.dtype or some[0].device != x.device):
            yield some
            some = []
        some.append(x)
    if some:
        yield some


def _byte_pieces(x: Tensor) -> Sequence[Tensor]:
    """A contiguous tensor as views of its bytes, as many as pass at a time."""
    return x.reshape(-1).view(torch.uint8).split(PIECE_BYTES) if x.numel() else ()
