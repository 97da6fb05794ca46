"""Real client updates through every scheme, side by side: bytes, error, speed.

Two networks on real data, early and late in training: the CNN of the FedAvg paper on MNIST by writer (1.66M
parameters) and a ResNet-18 on CIFAR-100's superclasses (11.2M). One client's update of a round goes through each
scheme, is really written to bytes, read back and compared; then what ours take at the others' errors, the index codes
on their own, and a model of 25M parameters at 1 %. Updates are kept in a folder, so that a second run starts at once.
NNCodec joins where it is installed (`pip install nncodec`, which builds from source), zstd where `zstandard` is.

    python benchmarks/bytes.py [--updates cnn-early ...] [--folder runs/updates] [--device auto] [--json FILE]
"""

import argparse
import functools
import importlib.machinery
import importlib.metadata
import itertools
import json
import math
import platform
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import sparing
from sparing.core.compose import compose, uplink
from sparing.core.context import context
from sparing.core.method import View
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.registry import known_recipes
from sparing.core.tree import Layout, layout_of, tree_of
from sparing.parts.code import sparsifiers
from sparing.parts.code.tight import tight_codec
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import study_from
from sparing.tasks.build import build_task
from sparing.train.local import train
from sparing.wire import from_bytes, parcel_sizes, to_bytes

TASKS: dict[str, dict[str, Any]] = {
    "cnn": {
        "task": {"data": "mnist-writers", "split": "writer", "clients": 100, "model": "fedavg-cnn"},
        "local": {"lr": 0.05, "epochs": 2, "batch": 10},
        "sample": 10,
        "rounds": {"early": 1, "late": 30},
    },
    "resnet18": {
        "task": {"data": "cifar100", "split": "superclass", "model": "resnet18"},
        "local": {"lr": 0.05, "steps": 40, "batch": 32},
        "sample": 2,
        "rounds": {"early": 1, "late": 60},
    },
}
OTHERS: dict[str, list[Any]] = {
    "fp16": ["fp16"],
    "int8": ["int8"],
    "top-k 10 %": ["topk"],
    "top-k 1 %": [{"topk": {"ratio": 0.01}}],
    "STC 1 %": [{"stc": {"ratio": 0.01, "down": False}}],
    "QSGD 7 levels": [{"qsgd": {"levels": 7}}],
    "QSGD 7 levels, buckets of 512": [{"qsgd": {"levels": 7, "bucket": 512}}],
    "EDEN 1 bit": ["eden"],
    "EDEN 2 bits": [{"eden": {"bits": 2}}],
}
"""Other people's schemes in our closed-form codes: no larger than theirs."""
OURS: dict[str, list[Any]] = {
    f"top-k {r:.3g} %, 8 bits, tight": [{"topk": {"ratio": r / 100}}, "int8", "tight"] for r in (0.1, 1, 10, 30)
}
OURS |= {"int8, tight": ["int8", "tight"], "STC 1 %, tight": [{"stc": {"ratio": 0.01, "down": False}}, "tight"]}
OURS |= {f"ecsq {step:g} rms": [{"ecsq": {"step": step}}] for step in (0.02, 0.1, 0.5, 1, 2, 3, 5)}
ENERGIES = (0.2, 0.35, 0.5, 0.75, 0.85, 0.9, 0.95, 0.98, 0.995)
OURS |= {f"low rank {100 * e:g} %": [{"lowrank": {"energy": e}}] for e in ENERGIES}
if "budget" in known_recipes():
    OURS |= {f"budget {kb} kB": [{"budget": {"bytes": f"{kb}kB"}}] for kb in (2, 5, 20, 80, 320)}
KINDS = ("top-k", "int8", "STC", "ecsq", "low rank", "budget")
"""Ours of one kind are points of one curve."""


Scheme = Callable[["Update"], tuple[Callable[[], bytes], Callable[[bytes], dict[str, Tensor]]]]
"""Made for an update, with all that is done once in a run: what writes it, and what reads the bytes."""


class Row(NamedTuple):
    scheme: str
    bytes: int
    error: float  # |decoded - update| / |update|
    encode: float  # seconds of processor time, one thread
    decode: float
    ours: bool = False


class Update(NamedTuple):
    layout: Layout
    delta: dict[str, Tensor]  # [1, *shape]

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.delta.items() if name in self.layout.params}


# ---------------------------------------------------------------------------------------------------- real updates


def update_of(name: str, folder: Path, device: str = "cpu") -> Update:
    """One client's update after so many rounds of FedAvg, from the folder or trained now."""
    kind, _, when = name.partition("-")
    about = TASKS[kind]
    rounds, local = about["rounds"][when], about["local"]
    task = build_task(**about["task"])
    net = task.build()
    layout = layout_of(net)
    file = folder / f"{name}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        study = {"rounds": rounds, "sample": about["sample"], "local": local, "device": device}
        before = sparing.run(about["task"], "fedavg", **study).model
        net.load_state_dict(before)
        start, ids = tree_of(net, layout), torch.tensor([0])
        ctx = context(0, rounds + 1, rounds + 1, ids, task.train.count[ids], len(task), int(task.train.count.sum()))
        after, _ = train(
            net, task.loss, task.train, study_from({"local": local}).local.local(), start, ctx, "loop-fast"
        )
        torch.save({name: after[name] - start[name] for name in layout.shapes}, file)
    return Update(layout, torch.load(file))


# -------------------------------------------------------------------------------------------------------- schemes


def ours(update: Update, method: list[Any]) -> tuple[Callable[[], bytes], Callable[[bytes], dict[str, Tensor]]]:
    """The library's own way: codecs, then the wire."""
    codec = uplink(compose(update.layout, *recipes_from_entries(method))._replace(memory=False))
    one = torch.tensor([0])
    ctx = context(0, 1, 1, one, one + 1, 1, 1, cohort=1)
    plain = Schema({n: Spec(tuple(x.shape[1:]), x.dtype) for n, x in update.delta.items()}, {})
    state, schema = codec.init(update.layout), codec.schema(plain, ctx)

    def write() -> bytes:
        parcel = Parcel({name: Leaf(x) for name, x in update.delta.items()}, {})
        return to_bytes(codec.encode(parcel, state, View(ctx, {}, {}, {}))[0], 0)

    def read(data: bytes) -> dict[str, Tensor]:
        decoded = codec.decode(from_bytes(data, schema), ctx)
        return {name: leaf.value for name, leaf in decoded.leaves.items()}

    return write, read


def raw(update: Update) -> tuple[Callable[[], bytes], Callable[[bytes], dict[str, Tensor]]]:
    def write() -> bytes:
        return np.concatenate([x.numpy().ravel() for x in update.delta.values()]).tobytes()

    return write, lambda data: cut(np.frombuffer(data, np.float32), update)


def zstd(update: Update) -> tuple[Callable[[], bytes], Callable[[bytes], dict[str, Tensor]]]:
    import zstandard  # pyright: ignore[reportMissingImports]

    write, read = raw(update)
    return lambda: zstandard.compress(write()), lambda data: read(zstandard.decompress(data))


def peers_topk(update: Update, ratio: float) -> tuple[Callable[[], bytes], Callable[[bytes], dict[str, Tensor]]]:
    """As two well-known libraries send it: an int64 position and a float32 for every kept value."""
    count = sum(x.numel() for x in update.delta.values())

    def write() -> bytes:
        flat = torch.cat([x.flatten() for x in update.delta.values()])
        places = flat.abs().topk(math.ceil(ratio * count)).indices
        return places.numpy().tobytes() + flat[places].numpy().tobytes()

    def read(data: bytes) -> dict[str, Tensor]:
        k = len(data) // 12
        out = np.zeros(count, np.float32)
        out[np.frombuffer(data, np.int64, k)] = np.frombuffer(data, np.float32, k, 8 * k)
        return cut(out, update)

    return write, read


def nncodec(update: Update, qp: int) -> tuple[Callable[[], bytes], Callable[[bytes], dict[str, Tensor]]]:
    codec = nncodec_module()

    def write() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            about = {"qp": qp, "verbose": False, "results": folder}
            return bytes(codec.encode({n: x[0].numpy() for n, x in update.params.items()}, about, incremental=True))

    def read(data: bytes) -> dict[str, Tensor]:
        return {n: torch.as_tensor(x)[None] for n, x in codec.decode(bytearray(data)).items()}

    return write, read


@functools.cache
def nncodec_module() -> Any:
    """NNCodec's coder; what it imports for training and data sets, torchvision above all, is not needed here."""
    importlib.metadata.version("nncodec")
    sys.meta_path.append(Nothing())  # pyright: ignore[reportArgumentType]
    return importlib.import_module("nncodec.nn")


class Nothing:
    """Finds an empty module under some names, in which every name is an empty class or another such module."""

    names = frozenset({"torchvision", "ptflops", "torchmetrics", "cv2", "pandas", "tqdm", "tensorflow"})

    class Module(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": lambda *_, **__: None}) if name[0].isupper() else Nothing.Module(name)

        def __call__(self, *_: Any, **__: Any) -> Any:
            return self

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        found = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None  # pyright: ignore

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self.Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def cut(flat: np.ndarray, update: Update) -> dict[str, Tensor]:
    parts = torch.from_numpy(flat.copy()).split([x.numel() for x in update.delta.values()])
    return {name: part.reshape(x.shape) for (name, x), part in zip(update.delta.items(), parts, strict=True)}


def schemes() -> Iterator[tuple[str, Scheme]]:
    yield "raw float32", raw
    yield "zstd", zstd
    for ratio in (0.1, 0.01):
        yield f"top-k {ratio:.0%} as peers send it", lambda update, ratio=ratio: peers_topk(update, ratio)
    for qp in (-56, -52, -48, -44, -40, -36):
        yield f"NNCodec, qp {qp}", lambda update, qp=qp: nncodec(update, qp)
    for name, method in (OTHERS | OURS).items():
        yield name, lambda update, method=method: ours(update, method)


def measured(name: str, scheme: Scheme, update: Update, times: int = 3) -> Row:
    """Processor time, the best of some runs, of one only where it takes long: others may use the machine."""
    write, read = scheme(update)
    encode = decode = math.inf
    data, back = b"", {}
    for _ in range(times):
        began = time.process_time()
        data = write()
        middle = time.process_time()
        back = read(data)
        end = time.process_time()
        encode, decode = min(encode, middle - began), min(decode, end - middle)
        if encode + decode > 3:
            break
    wrong = sum(float((back[n].double() - x.double()).square().sum()) for n, x in update.params.items())
    whole = sum(float(x.double().square().sum()) for x in update.params.values())
    return Row(name, len(data), math.sqrt(wrong / whole), encode, decode, name in OURS)


def side_by_side(update: Update) -> list[Row]:
    rows, missing = [], set()
    for name, scheme in schemes():
        try:
            rows.append(measured(name, scheme, update))
        except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError) as error:
            missing.add(error.name)
    if missing:
        print(f"left out, since not installed: {', '.join(map(str, sorted(missing, key=str)))}")
    return rows


def table(rows: list[Row], update: Update) -> str:
    size = sum(x.numel() * x.element_size() for x in update.delta.values())
    lines = ["| scheme | bytes | times smaller | error | encode MB/s | decode MB/s |", "|---|---|---|---|---|---|"]
    for row in rows:
        speed = " | ".join(f"{size / 1e6 / max(s, 1e-9):,.0f}" for s in (row.encode, row.decode))
        lines.append(f"| {row.scheme} | {row.bytes:,} | {size / row.bytes:,.1f} | {row.error:.3f} | {speed} |")
    return "\n".join(lines)


def against(rows: list[Row]) -> list[str]:
    """What ours take at the error of every other scheme, and how many times fewer bytes that is."""
    said, lost, finer = [], [], []
    for other in (row for row in rows if not row.ours):
        curves = [[row for row in rows if row.ours and row.scheme.startswith(kind)] for kind in KINDS]
        best, kind = min((at_error(curve, other.error), kind) for curve, kind in zip(curves, KINDS, strict=True))
        if not math.isfinite(best):
            finer.append(other.scheme)
            continue
        theirs = f"{other.scheme}: {other.bytes:,} bytes at {other.error:.3f}"
        said.append(f"{theirs}; ours {best:,.0f} ({kind}), {other.bytes / best:.1f} times fewer")
        lost += [other.scheme] if best > other.bytes else []
    said.append(f"finer than any of ours: {', '.join(finer) or 'none'}")
    return [*said, f"ours take more bytes at the error of: {', '.join(lost) or 'none'}"]


def at_error(curve: list[Row], error: float) -> float:
    """Bytes at this error, log-linear between neighbours; beyond the largest error, the fewest bytes of all."""
    ordered = sorted(curve, key=lambda row: row.error)
    least = min((row.bytes for row in ordered if row.error <= error), default=math.inf)
    for a, b in itertools.pairwise(ordered):
        if a.error <= error <= b.error:
            share = (error - a.error) / max(b.error - a.error, 1e-12)
            return min(least, math.exp((1 - share) * math.log(a.bytes) + share * math.log(b.bytes)))
    return least


# ------------------------------------------------------------------------------------------- indices, and speed


def index_bytes(update: Update) -> list[str]:
    """Bytes of the positions alone over log2 C(d, k), with closed-form codes and with tight ones."""
    said = []
    layout = update.layout
    for ratio in (0.1, 0.01, 0.001):
        floor, found = 0.0, []
        for stages in ([sparsifiers.topk_codec(layout, ratio)], [sparsifiers.topk_codec(layout, ratio), tight_codec()]):
            parcel = Parcel({name: Leaf(x) for name, x in update.params.items()}, {})
            one = torch.tensor([0])
            view = View(context(0, 1, 1, one, one + 1, 1, 1), {}, {}, {})
            for stage in stages:
                parcel, _ = stage.encode(parcel, {}, view)
            found.append(float(parcel_sizes(parcel)["index"][0]) + len(parcel.leaves))
            floor = sum(choices(leaf.value[0].numel(), int(leaf.keep[0].sum())) for leaf in parcel.leaves.values()) / 8
        said.append(f"{ratio:.1%}: closed form {found[0] / floor:.2f}, tight {found[1] / floor:.2f} of log2 C(d, k)")
    return said


def choices(d: int, k: int) -> float:
    """log2 C(d, k)"""
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


def large(count: int = 25_000_000, ratio: float = 0.01) -> str:
    """Select and encode, then decode, a model of this size; rows and columns of different strength, as in real ones."""
    g = torch.Generator().manual_seed(0)
    side = int(math.sqrt(count / 4))
    shapes = {f"w{i}": (side, side) for i in range(4)}
    layout = Layout(shapes, dict.fromkeys(shapes, torch.float32))
    rows, columns = (torch.exp(torch.randn(*s, generator=g)) for s in ((1, side, 1), (1, 1, side)))
    delta = {name: torch.randn(1, side, side, generator=g) * rows * columns for name in shapes}
    method = [{"topk": {"ratio": ratio}}, "int8", "tight"]
    row = measured("", lambda update: ours(update, method), Update(layout, delta), times=9)
    took = f"{row.bytes:,} bytes, select and encode {row.encode:.3f} s, decode {row.decode:.3f} s, best of 9"
    return f"{4 * side * side:,} parameters at {ratio:.0%}: {took}"


def main() -> None:
    names = [f"{kind}-{when}" for kind, about in TASKS.items() for when in about["rounds"]]
    options = argparse.ArgumentParser()
    options.add_argument("--updates", nargs="*", default=names, choices=names)
    options.add_argument("--folder", type=Path, default=Path("runs/updates"))
    options.add_argument("--device", default="cpu", help="where updates that are not there yet are trained")
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, numpy {np.__version__}, one thread, processor time")
    kept = {}
    for name in args.updates:
        update = update_of(name, args.folder, args.device)
        rows = side_by_side(update)
        kept[name] = [row._asdict() for row in rows]
        print(f"\n{name}: {sum(x.numel() for x in update.delta.values()):,} parameters\n\n{table(rows, update)}\n")
        print("\n".join([*against(rows), "", *index_bytes(update)]), flush=True)
    print(f"\n{large()}")
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
