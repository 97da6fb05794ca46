"""Parts of models, all tensors at once: what came, written over a client's own, and what goes up of what it learned."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.cuda.places import block_of, in_rows, places_of
from sparing.accel.cuda.stretches import stretch_blocks

BLOCK = 4096


@triton.jit
def overlay_kernel(table, stretch, start, stop, first, out, K, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    s, i, j, begin, end = block_of(stretch, start, stop, first, tl.program_id(0), BLOCK)
    here, at = i < end, table + s * 6
    own = tl.load(at).to(tl.pointer_type(tl.float32)) + row * tl.load(at + 3)
    new = tl.load(at + 1).to(tl.pointer_type(tl.float32)) + row * tl.load(at + 4)
    mask = tl.load(at + 2).to(tl.pointer_type(tl.int8)) + row * tl.load(at + 5)
    written = tl.load(mask + j, mask=here, other=0) != 0
    value = tl.where(written, tl.load(new + j, mask=here), tl.load(own + j, mask=here))
    tl.store(out + begin.to(tl.int64) * K + row * (end - begin) + j, value, mask=here)


@triton.jit
def cut_kernel(table, stretch, start, stop, first, whole, out, width, K, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    s, i, j, begin, end = block_of(stretch, start, stop, first, tl.program_id(0), BLOCK)
    here, at = i < end, table + s * 8
    value = tl.load(tl.load(at).to(tl.pointer_type(tl.float32)) + row * tl.load(at + 4) + j, mask=here)
    grown, base = tl.load(at + 1), tl.load(at + 2)
    if grown != 0:
        value += tl.load(grown.to(tl.pointer_type(tl.float32)) + row * tl.load(at + 5) + j, mask=here)
        tl.store(whole + begin.to(tl.int64) * K + row * (end - begin) + j, value, mask=here)
    if base != 0:
        value -= tl.load(base.to(tl.pointer_type(tl.float32)) + row * tl.load(at + 6) + j, mask=here)
    keep = tl.load(tl.load(at + 3).to(tl.pointer_type(tl.int8)) + row * tl.load(at + 7) + j, mask=here, other=0) != 0
    tl.store(out + row * width + i, tl.where(keep, value, 0.0), mask=here)


def overlay_parts(parts: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Of each (own, new, mask), float32, `where(mask, new, own)`, `[K, ...]`."""
    k, rows = max(x.shape[0] for some in parts for x in some), [[in_rows(x) for x in some] for some in parts]
    sizes = tuple(own[0].numel() for own, _, _ in parts)
    device = parts[0][0].device
    tables, out = stretch_blocks(sizes, BLOCK, device), torch.empty(k * sum(sizes), device=device)
    overlay_kernel[(len(tables.stretch), k)](places_of(rows, device), *tables, out, k, BLOCK=BLOCK)
    return by_tensor(out, k, [own.shape for own, _, _ in parts])


Part = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""(x `[K, ...]`, what it was added to, base, mask)."""


def cut_parts(parts: list[Part]) -> tuple[list[Tensor], list[Tensor]]:
    """Of each part, float32, x and what it was added to; and of that `where(mask, that - base, 0)`.

    The latter stand side by side in rows. The former are made only of parts that were added to something; of others
    there is nothing sensible in their place.
    """
    k, sizes = parts[0][0].shape[0], tuple(part[0][0].numel() for part in parts)
    rows, device = [[None if x is None else in_rows(x) for x in part] for part in parts], parts[0][0].device
    tables, out = stretch_blocks(sizes, BLOCK, device), torch.empty(k, sum(sizes), device=device)
    whole = torch.empty(k * sum(sizes), device=device) if any(part[1] is not None for part in parts) else out
    cut_kernel[(len(tables.stretch), k)](places_of(rows, device), *tables, whole, out, sum(sizes), k, BLOCK=BLOCK)
    shapes = [part[0].shape for part in parts]
    pieces = [part.view(shape) for part, shape in zip(out.split(sizes, 1), shapes, strict=True)]
    return by_tensor(whole.view(-1), k, shapes), pieces


def by_tensor(row: Tensor, k: int, shapes: list[torch.Size]) -> list[Tensor]:
    """Tensors `[K, ...]` that stand one behind the other."""
    parts = row.split([k * shape[1:].numel() for shape in shapes])
    return [part.view(k, *shape[1:]) for part, shape in zip(parts, shapes, strict=True)]
