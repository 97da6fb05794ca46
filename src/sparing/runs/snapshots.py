"""Pictures of a run: what a table has no place for, a line of JSON each, in pictures.jsonl of its folder.

split        how many training samples of each label a client has                         in round 1
sizes        which size of model a client has, where they differ                          in round 1
similarity   how alike clients are, as pFedSim's server knows it                          in the rounds that are shown
cosines      the same of all clients of a round, by their updates                         if `record` has similarity
updates      one client's update of each layer, by filter and channel                     if `record` has updates

Shown are round 1 and those after 15 %, 50 % and all of the run. What a study asks to record costs some clients'
training once more in those rounds; it is thrown away, and changes nothing.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError
from sparing.core.method import Lesson, Rows, Trained
from sparing.core.round import Server, client, method_for_size, outgoing
from sparing.core.tree import Kind, Layout, Tree, cat_trees, under
from sparing.engines.engine import Job, chunks_of_size, cohort_context

Snapshot = dict[str, Any]  # "kind", "round", and what belongs to that kind
_SHOWN_SHARES = (0.0, 0.15, 0.5, 1.0)
_MOST_CLIENTS_SHOWN = 100  # in a picture at most
_MOST_LABELS_SHOWN = 100
_HEAT_MAP_SIDE = 32  # filters and channels of a heat map at most; neighbours share a cell where there are more
_MOST_HEAT_MAPS = 3  # with a heat map at most
_SHUFFLES = 5
_SNAPSHOT_DIGITS = 4


def is_snapshot_round(t: int, last: int) -> bool:
    """
    >>> [t for t in range(1, 101) if is_snapshot_round(t, 100)]
    [1, 15, 50, 100]
    """
    return t in {max(1, math.floor(share * last + 0.5)) for share in _SHOWN_SHARES}


def snapshot_lines(pictures: list[Snapshot]) -> str:
    """Ready to append to pictures.jsonl."""
    return "".join(json.dumps(picture) + "\n" for picture in pictures)


def snapshots_before_round(
    job: Job, bank: Rows, server: Server, ids: Tensor, t: int, record: Sequence[str]
) -> list[Snapshot]:
    """Of round t, about to begin with these clients: what their updates will look like."""
    if not record or not len(ids):
        return []
    found: list[Snapshot] = []
    cohort = cohort_context(job, server, ids, t)
    if "updates" in record:
        ctx = cohort.at(slice(0, 1))
        update, kinds = _train_for_snapshot(job, bank, server, ctx), method_for_size(job.method, ctx).layout.kinds
        found += [{"round": t, "client": int(ids[0])} | layer for layer in _layer_snapshots(update, kinds, job.seed)]
    if "similarity" in record:
        some = cohort.at(_evenly_spaced(len(ids)))
        parts = [
            (ctx.ids, _train_for_snapshot(job, bank, server, ctx)) for ctx in chunks_of_size(some, job.chunk, None)
        ]
        update, who = cat_trees([part for _, part in parts]), torch.cat([ids for ids, _ in parts])
        order = who.argsort()
        named = {name: update[name][order] for name in job.method.layout.params}
        found.append({"kind": "cosines", "round": t, "ids": who[order].tolist(), "values": _update_cosines(named)})
    return found


def snapshots_after_round(job: Job, server: Server, t: int) -> list[Snapshot]:
    """Of a round that is done: what there is to see without training anybody."""
    found: list[Snapshot] = []
    if t == 1:
        found += _split_snapshot(job) + _sizes_snapshot(job, server)
    for i, step in enumerate(job.method.blend.steps):
        if step.name == "pfedsim":
            found += _similarity_snapshot(under(str(i), server.blend), len(job.task))
    return [{"round": t} | picture for picture in found]


def _train_for_snapshot(job: Job, bank: Rows, server: Server, ctx: Ctx) -> Tree:
    """What these K clients would learn this round: [K, *shape] on the CPU."""
    seen: Tree = {}

    def watched(lesson: Lesson, ctx: Ctx) -> Trained:
        done = job.train(lesson, ctx)
        if not seen:
            seen.update({name: (x.double() - lesson.start[name].double()).cpu() for name, x in done.after.items()})
        return done

    with torch.no_grad():
        client(job.method, bank.read(ctx.ids), outgoing(job.method, server, ctx), watched, ctx)
    return seen


def _layer_snapshots(update: Tree, kinds: dict[str, Kind], seed: int) -> list[Snapshot]:
    """Convolutions, or dense layers where there are none; some of them as a map of mean |u|."""
    names = [name for name, kind in kinds.items() if kind.name == "conv"] or list(kinds)
    drawn = [names[i] for i in _evenly_spaced(len(names), _MOST_HEAT_MAPS).tolist()]
    out = []
    for name in names:
        size = update[name][0].abs()
        by_filter, by_channel = _filters_and_channels(size, kinds[name].groups)
        picture: Snapshot = {"kind": "updates", "layer": name, "shape": list(size.shape)}
        picture["filter"] = [
            _json_number(_intraclass_correlation(by_filter)),
            _json_number(_shuffled_correlation(by_filter, seed)),
        ]
        picture["channel"] = [
            _json_number(_intraclass_correlation(by_channel)),
            _json_number(_shuffled_correlation(by_channel, seed)),
        ]
        if name in drawn:
            heat = size.flatten(2).mean(2) if size.dim() > 2 else size
            small = adaptive_avg_pool2d(
                heat[None], (min(_HEAT_MAP_SIDE, heat.shape[0]), min(_HEAT_MAP_SIDE, heat.shape[1]))
            )[0]
            picture["values"] = [[_json_number(x) for x in row] for row in small.tolist()]
        out.append(picture)
    return out


def _filters_and_channels(size: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The entries of each filter, and of each channel, in a row: a weight is [filters, channels per group, *kernel]."""
    parts = size.reshape(groups, size.shape[0] // groups, size.shape[1], -1)
    return size.flatten(1), parts.transpose(1, 2).flatten(0, 1).flatten(1)


def _intraclass_correlation(rows: Tensor) -> float:
    """The intraclass correlation: of two entries of one row. 1 where rows are constant, near 0 by chance.

    >>> _intraclass_correlation(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    1.0
    >>> _intraclass_correlation(torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    -1.0
    """
    count, members = rows.shape
    if count < 2 or members < 2:
        return math.nan
    mean = rows.mean(1, keepdim=True)
    between = float(members * (mean - rows.mean()).square().sum()) / (count - 1)
    inside = float((rows - mean).square().sum()) / (count * (members - 1))
    whole = between + (members - 1) * inside
    return (between - inside) / whole if whole else math.nan


def _shuffled_correlation(rows: Tensor, seed: int) -> float:
    """The same of the same entries in any other order, on average."""
    draw, flat = torch.Generator().manual_seed(seed), rows.flatten()
    orders = (torch.randperm(len(flat), generator=draw) for _ in range(_SHUFFLES))
    return sum(_intraclass_correlation(flat[order].reshape(rows.shape)) for order in orders) / _SHUFFLES


def _update_cosines(update: Tree) -> list[list[float | None]]:
    """Of every two clients' updates."""
    flat = torch.cat([x.flatten(1) for x in update.values()], dim=1)
    unit = flat / flat.norm(dim=1, keepdim=True)
    return [[_json_number(x) for x in row] for row in (unit @ unit.T).tolist()]


def _similarity_snapshot(state: Tree, clients: int) -> list[Snapshot]:
    """pFedSim's similarities; none where two never met, or are not alike."""
    if not len(state["pairs"]):
        return []
    known = state["stored"].nonzero()[:, 0].cpu()
    ids = known[_evenly_spaced(len(known))]
    found = dict(zip(state["pairs"].tolist(), state["similarity"].tolist(), strict=True))
    values = [[_json_number(found.get(i * clients + j, math.nan)) for j in ids.tolist()] for i in ids.tolist()]
    return [{"kind": "similarity", "ids": ids.tolist(), "values": values}]


def _split_snapshot(job: Job) -> list[Snapshot]:
    """Who trains on what, clients in their order, or, of many, some from the largest to the smallest."""
    data, clients = job.task.train, len(job.task)
    rank = torch.arange(clients) if clients <= _MOST_CLIENTS_SHOWN else data.count.argsort(descending=True, stable=True)
    ids = rank[_evenly_spaced(clients)]
    picture: Snapshot = {"kind": "split", "ids": ids.tolist(), "samples": data.count[ids].tolist()}
    picture |= {"clients": clients, "total": int(data.count.sum())}
    is_class = data.y.dim() == 1 and not data.y.is_floating_point()
    if data.is_whole and is_class and int(data.y.max()) < _MOST_LABELS_SHOWN:
        labels = int(data.y.max()) + 1
        picture["values"] = [torch.bincount(data.client(i)[1].cpu(), minlength=labels).tolist() for i in ids.tolist()]
    return [picture]


def _sizes_snapshot(job: Job, server: Server) -> list[Snapshot]:
    fit = job.method.fit
    if fit is None:
        return []
    ctx = cohort_context(job, server, torch.arange(len(job.task)), 1)
    parameters = [layout.size for layout in fit.layouts]
    names = list(fit.names) or [f"{count:,} parameters" for count in parameters]
    whole = dict.fromkeys(name.rpartition(".")[0] for name in job.method.layout.params)
    layers = {layer: [_layer_parameters(layout, layer) for layout in fit.layouts] for layer in whole}
    picture = {"kind": "sizes", "names": names, "parameters": parameters, "layers": layers}
    return [picture | {"sizes": fit.sizes(ctx).tolist()}]


def _layer_parameters(layout: Layout, layer: str) -> int:
    """Parameters of a layer, in however many factors."""
    return sum(math.prod(layout.shapes[name]) for name in layout.params if name.startswith(f"{layer}."))


def _evenly_spaced(count: int, most: int = _MOST_CLIENTS_SHOWN) -> Tensor:
    """At most so many places, evenly spread."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()


def _json_number(x: float) -> float | None:
    """As JSON has it, in a few digits."""
    return float(f"{x:.{_SNAPSHOT_DIGITS}g}") if math.isfinite(x) else None


def refuse_similarity_of_sizes(job: Job) -> None:
    if job.method.fit is not None:
        raise ConfigError(
            "record has similarity, which compares updates of one shape, but the method gives clients models of "
            "several sizes; drop it"
        )
