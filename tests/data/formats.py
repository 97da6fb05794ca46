"""Small files in the real formats, for the tests of the loaders."""

import gzip
import io
import json
import pickle
import struct
import tarfile

import numpy as np
from PIL import Image

CODES = {"uint8": 8, "int32": 12}


def random_images(n, shape=(28, 28), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def idx_bytes(array):
    head = bytes([0, 0, CODES[array.dtype.name], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 1) if path.name.endswith("ubyte.gz") else data)


def write_mnist(folder, train=6, test=4, ending=".gz"):
    x, y = random_images(train + test), (np.arange(train + test) % 10).astype(np.uint8)
    for name, array in (
        ("train-images-idx3-ubyte", x[:train]),
        ("train-labels-idx1-ubyte", y[:train]),
        ("t10k-images-idx3-ubyte", x[train:]),
        ("t10k-labels-idx1-ubyte", y[train:]),
    ):
        write(folder / f"{name}{ending}", idx_bytes(array))
    return x, y


def cifar_records(n, labels, seed=0):
    """Records of the binary version: labels below 20, then 3 x 32 x 32 bytes."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.integers(0, 10, (n, labels), dtype=np.uint8), random_images(n, (3072,), seed)], 1)


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def cifar_batch(records, keys):
    """One batch of the Python version."""
    batch = {key: records[:, i].tolist() for i, key in enumerate(keys)}
    return pickle.dumps({**batch, "data": records[:, len(keys) :].copy()}, protocol=2)


def write_leaf(folder, train, test):
    for half, held in (("train", train), ("test", test)):
        (folder / half).mkdir(parents=True, exist_ok=True)
        for i, data in enumerate(held):
            sizes = [len(data[user]["y"]) for user in data]
            whole = {"users": list(data), "num_samples": sizes, "user_data": data}
            (folder / half / f"all_data_{i}_niid_0_keep_0_{half}_9.json").write_text(json.dumps(whole))


def write_picture(path, size=(8, 6), colour=(200, 10, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_pfllib(folder, clients, classes=3, config=None):
    """`clients` is one ((x, y) train, (x, y) test) per client."""
    for half, at in (("train", 0), ("test", 1)):
        (folder / half).mkdir(parents=True, exist_ok=True)
        for i, client in enumerate(clients):
            with (folder / half / f"{i}.npz").open("wb") as file:
                np.savez_compressed(file, data={"x": client[at][0], "y": client[at][1]})
    held = {"num_clients": len(clients), "num_classes": classes, "non_iid": True, "partition": "dir"}
    (folder / "config.json").write_text(json.dumps(held if config is None else config))
