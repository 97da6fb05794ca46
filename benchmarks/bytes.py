"""Real client updates through every scheme, side by side: bytes, error, speed.

Two networks on real data, early and late in training: the CNN of the FedAvg paper on MNIST by writer (1.66M
parameters) and a ResNet-18 on CIFAR-100's superclasses (11.2M). One client's update of a round goes through each
scheme, is really written to bytes, read back and compared; then the index codes on their own, and a model of 25M
parameters at 1 %. Updates are kept in a folder, so that a second run starts at once. NNCodec joins where it is
installed (`pip install nncodec`, which builds from source), zstd where `zstandard` is.

    python benchmarks/bytes.py [--updates cnn-early ...] [--folder runs/updates] [--json FILE]
"""

import argparse
import functools
import importlib.machinery
import importlib.metadata
import itertools
import json
import math
import platform
import statistics
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
from sparing.core.keys import Ctx
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.protocols import Local, Phase, View
from sparing.core.tree import Layout, layout_of, tree_of
from sparing.core.wire import from_bytes, sizes, to_bytes
from sparing.parts import sparse
from sparing.parts.tight import tight
from sparing.run.methods import recipes
from sparing.task.build import build_task
from sparing.task.local import train

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
        "rounds": {"early": 1, "late": 8},
    },
}
METHODS: dict[str, list[Any]] = {
    "fp16": ["fp16"],
    "int8": ["int8"],
    "int8, tight": ["int8", "tight"],
    "top-k 10 %": ["topk"],
    "top-k 10 %, 8 bits, tight": ["topk", "int8", "tight"],
    "top-k 1 %": [{"topk": {"ratio": 0.01}}],
    "top-k 1 %, 8 bits, tight": [{"topk": {"ratio": 0.01}}, "int8", "tight"],
    "STC 1 %": [{"stc": {"ratio": 0.01, "down": False}}],
    "STC 1 %, tight": [{"stc": {"ratio": 0.01, "down": False}}, "tight"],
    "QSGD 7 levels": [{"qsgd": {"levels": 7}}],
    "EDEN 1 bit": ["eden"],
    "EDEN 2 bits": [{"eden": {"bits": 2}}],
}
METHODS |= {f"ecsq {step:g} rms": [{"ecsq": {"step": step}}] for step in (0.5, 1, 2, 3)}
METHODS |= {f"low rank {e:.0%}": [{"lowrank": {"energy": e}}] for e in (0.5, 0.75, 0.85, 0.9, 0.95, 0.98)}


class Row(NamedTuple):
    scheme: str
    bytes: int
    error: float  # |decoded - update| / |update|
    encode: float  # seconds, one thread
    decode: float


class Update(NamedTuple):
    layout: Layout
    delta: dict[str, Tensor]  # [1, *shape]

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.delta.items() if name in self.layout.params}


# ---------------------------------------------------------------------------------------------------- real updates


def update_of(name: str, folder: Path) -> Update:
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
        before = sparing.run(about["task"], "fedavg", rounds=rounds, sample=about["sample"], local=local).model
        net.load_state_dict(before)
        start, ids = tree_of(net, layout), torch.tensor([0])
        ctx = Ctx(0, rounds + 1, rounds + 1, ids, task.train.count[ids], len(task), int(task.train.count.sum()))
        after, _ = train(net, task.loss, task.train, Local((Phase(**local),)), start, ctx)
        torch.save({name: after[name] - start[name] for name in layout.shapes}, file)
    return Update(layout, torch.load(file))


# -------------------------------------------------------------------------------------------------------- schemes


def ours(update: Update, method: list[Any]) -> tuple[bytes, Callable[[bytes], dict[str, Tensor]]]:
    """The library's own way: codecs, then the wire."""
    codec = uplink(compose(update.layout, *recipes(method))._replace(memory=False))
    one = torch.tensor([0])
    ctx = Ctx(0, 1, 1, one, one + 1, 1, 1, cohort=1)
    parcel = Parcel({name: Leaf(x) for name, x in update.delta.items()}, {})
    state = codec.init(update.layout)
    plain = Schema({n: Spec(tuple(x.shape[1:]), x.dtype) for n, x in update.delta.items()}, {})
    out, _ = codec.encode(parcel, state, View(ctx, {}, {}, {}))

    def read(data: bytes) -> dict[str, Tensor]:
        decoded = codec.decode(from_bytes(data, codec.schema(plain, ctx)), ctx)
        return {name: leaf.value for name, leaf in decoded.leaves.items()}

    return to_bytes(out, 0), read


def raw(update: Update) -> tuple[bytes, Callable[[bytes], dict[str, Tensor]]]:
    flat = np.concatenate([x.numpy().ravel() for x in update.delta.values()])
    return flat.tobytes(), lambda data: cut(np.frombuffer(data, np.float32), update)


def zstd(update: Update) -> tuple[bytes, Callable[[bytes], dict[str, Tensor]]]:
    import zstandard

    data, read = raw(update)
    return zstandard.compress(data), lambda data: read(zstandard.decompress(data))


def peers_topk(update: Update, ratio: float) -> tuple[bytes, Callable[[bytes], dict[str, Tensor]]]:
    """As two well-known libraries send it: an int64 position and a float32 for every kept value."""
    flat = torch.cat([x.flatten() for x in update.delta.values()])
    places = flat.abs().topk(math.ceil(ratio * len(flat))).indices
    data = places.numpy().tobytes() + flat[places].numpy().tobytes()

    def read(data: bytes) -> dict[str, Tensor]:
        k = len(data) // 12
        out = np.zeros(len(flat), np.float32)
        out[np.frombuffer(data, np.int64, k)] = np.frombuffer(data, np.float32, k, 8 * k)
        return cut(out, update)

    return data, read


def nncodec(update: Update, qp: int) -> tuple[bytes, Callable[[bytes], dict[str, Tensor]]]:
    codec = nncodec_module()
    with tempfile.TemporaryDirectory() as folder:
        about = {"qp": qp, "verbose": False, "results": folder}
        data = codec.encode({n: x[0].numpy() for n, x in update.params.items()}, about, incremental=True)
    read = lambda data: {n: torch.as_tensor(x)[None] for n, x in codec.decode(bytearray(data)).items()}  # noqa: E731
    return bytes(data), read


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


def schemes() -> Iterator[tuple[str, Callable[[Update], tuple[bytes, Callable]]]]:
    yield "raw float32", raw
    yield "zstd", zstd
    for ratio in (0.1, 0.01):
        yield f"top-k {ratio:.0%} as peers send it", lambda update, ratio=ratio: peers_topk(update, ratio)
    for qp in (-56, -52, -48, -44, -40, -36):
        yield f"NNCodec, qp {qp}", lambda update, qp=qp: nncodec(update, qp)
    for name, method in METHODS.items():
        yield name, lambda update, method=method: ours(update, method)


def measured(name: str, scheme: Callable, update: Update) -> Row:
    began = time.perf_counter()
    data, read = scheme(update)
    middle = time.perf_counter()
    back = read(data)
    end = time.perf_counter()
    wrong = sum(float((back[n].double() - x.double()).square().sum()) for n, x in update.params.items())
    whole = sum(float(x.double().square().sum()) for x in update.params.values())
    return Row(name, len(data), math.sqrt(wrong / whole), middle - began, end - middle)


def side_by_side(update: Update) -> list[Row]:
    rows = []
    for name, scheme in schemes():
        try:
            rows.append(measured(name, scheme, update))
        except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError) as error:
            print(f"{name}: left out, {error.name} is not installed")
    return rows


def table(rows: list[Row], update: Update) -> str:
    size = sum(x.numel() * x.element_size() for x in update.delta.values())
    lines = ["| scheme | bytes | times smaller | error | encode MB/s | decode MB/s |", "|---|---|---|---|---|---|"]
    for row in rows:
        speed = " | ".join(f"{size / 1e6 / max(s, 1e-9):,.0f}" for s in (row.encode, row.decode))
        lines.append(f"| {row.scheme} | {row.bytes:,} | {size / row.bytes:,.1f} | {row.error:.3f} | {speed} |")
    return "\n".join(lines)


def against(rows: list[Row], rival: str) -> list[str]:
    """How many times fewer bytes ours take at the rival's own errors, on the line between our two nearest points."""
    said = []
    for other in (row for row in rows if row.scheme.startswith(rival)):
        best = min((at_error(curve, other.error) for curve in curves(rows)), default=math.inf)
        if math.isfinite(best):
            theirs = f"{other.scheme}: {other.bytes:,} bytes at {other.error:.3f}"
            said.append(f"{theirs}; ours {best:,.0f}, {other.bytes / best:.1f} times fewer")
    return said


def curves(rows: list[Row]) -> list[list[Row]]:
    return [[row for row in rows if row.scheme.startswith(kind)] for kind in ("ecsq", "low rank")]


def at_error(curve: list[Row], error: float) -> float:
    """Bytes at this error, log-linear between neighbours; none beyond the ends."""
    ordered = sorted(curve, key=lambda row: row.error)
    for a, b in itertools.pairwise(ordered):
        if a.error <= error <= b.error:
            share = (error - a.error) / max(b.error - a.error, 1e-12)
            return math.exp((1 - share) * math.log(a.bytes) + share * math.log(b.bytes))
    return math.inf


# ------------------------------------------------------------------------------------------- indices, and speed


def index_bytes(update: Update) -> list[str]:
    """Bytes of the positions alone over log2 C(d, k), with closed-form codes and with tight ones."""
    said = []
    layout = update.layout
    for ratio in (0.1, 0.01, 0.001):
        floor, found = 0.0, []
        for stages in ([sparse.topk(layout, ratio)], [sparse.topk(layout, ratio), tight()]):
            parcel = Parcel({name: Leaf(x) for name, x in update.params.items()}, {})
            one = torch.tensor([0])
            view = View(Ctx(0, 1, 1, one, one + 1, 1, 1), {}, {}, {})
            for stage in stages:
                parcel, _ = stage.encode(parcel, {}, view)
            found.append(float(sizes(parcel)["index"][0]) + len(parcel.leaves))
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
    runs = [measured("", lambda update: ours(update, method), Update(layout, delta)) for _ in range(3)]
    encode, decode = (statistics.median(getattr(run, name) for run in runs) for name in ("encode", "decode"))
    took = f"{runs[0].bytes:,} bytes, select and encode {encode:.2f} s, decode {decode:.2f} s"
    return f"{4 * side * side:,} parameters at {ratio:.0%}: {took}"


def main() -> None:
    names = [f"{kind}-{when}" for kind, about in TASKS.items() for when in about["rounds"]]
    options = argparse.ArgumentParser()
    options.add_argument("--updates", nargs="*", default=names, choices=names)
    options.add_argument("--folder", type=Path, default=Path("runs/updates"))
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, numpy {np.__version__}, one thread")
    kept = {}
    for name in args.updates:
        update = update_of(name, args.folder)
        rows = side_by_side(update)
        kept[name] = [row._asdict() for row in rows]
        print(f"\n{name}: {sum(x.numel() for x in update.delta.values()):,} parameters\n\n{table(rows, update)}\n")
        for line in (*against(rows, "NNCodec"), *index_bytes(update)):
            print(line)
    print(f"\n{large()}")
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
