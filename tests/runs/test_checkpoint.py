import json
import random
import tracemalloc

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.errors import CheckpointError
from sparing.core.tree import tree_sha256
from sparing.runs.files import checkpoint
from sparing.runs.files.checkpoint import _DTYPES, load_checkpoint, save_checkpoint

META = {"round": 7, "plan": {"path": "stacked", "chunk": 16}, "names": ["é", 'quote " and \\'], "lr": 0.1, "none": None}


def some_tensors():
    return {
        "flags": torch.tensor([True, False, True]),
        "server/w": torch.randn(3, 4),
        "counts": torch.arange(5),
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "narrow": torch.randn(3).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "codes": torch.randint(-8, 8, (5,), dtype=torch.int8),
    }


def assert_same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
    assert tree_sha256(a) == tree_sha256(b)


def test_round_trip(tmp_path):
    tensors = some_tensors()
    save_checkpoint(tmp_path / "c", tensors, META)
    back, meta = load_checkpoint(tmp_path / "c")
    assert_same(back, tensors)
    assert meta == META


@pytest.mark.parametrize("dtype", list(_DTYPES.values()), ids=list(_DTYPES))
def test_every_dtype(tmp_path, dtype):
    bits = (
        torch.randint(0, 2, (6, 8), dtype=torch.uint8) if dtype == torch.bool else torch.randint(0, 256, (6, 8)).byte()
    )
    x = bits.view(dtype)
    save_checkpoint(tmp_path / "c", {"x": x, "pad": torch.zeros(3, dtype=torch.uint8)}, {})
    assert torch.equal(load_checkpoint(tmp_path / "c")[0]["x"].view(torch.uint8), bits)


def test_other_readers_agree(tmp_path):
    tensors = some_tensors()
    save_checkpoint(tmp_path / "c", tensors, META)
    back = safetensors.torch.load_file(tmp_path / "c")
    assert tree_sha256(back) == tree_sha256(tensors)


def test_every_tensor_is_aligned():
    entries = checkpoint._tensor_entries(some_tensors())
    for entry in entries.values():
        assert entry["data_offsets"][0] % _DTYPES[entry["dtype"]].itemsize == 0
    assert len(checkpoint._checkpoint_header(entries, "{}", checkpoint._BLANK_DIGEST)) % 8 == 0


def test_views_are_saved_as_they_look(tmp_path):
    x = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "t": x.t(),
        "step": x[:, ::2],
        "same": x[:1].expand(5, 4),
        "part": x[1:],
        "grad": x.clone().requires_grad_(),
        "none": x[:, :0].t(),
    }
    save_checkpoint(tmp_path / "c", tensors, {})
    back, _ = load_checkpoint(tmp_path / "c")
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@settings(max_examples=30, deadline=None)
@given(
    names=st.lists(
        st.text(max_size=12).filter(lambda s: s.isprintable() and s != "__metadata__"), unique=True, max_size=5
    ),
    shape=st.lists(st.integers(0, 3), max_size=3),
    meta=st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)),
)
def test_any_names_shapes_and_meta(tmp_path_factory, names, shape, meta):
    path = tmp_path_factory.getbasetemp() / "any"
    tensors = {name: torch.randn(shape) for name in names}
    save_checkpoint(path, tensors, meta)
    back, known = load_checkpoint(path)
    assert_same(back, tensors)
    assert known == meta


def test_nothing_at_all(tmp_path):
    save_checkpoint(tmp_path / "c", {}, {})
    assert load_checkpoint(tmp_path / "c") == ({}, {})


def regions(data: bytes) -> dict[str, range]:
    head = 8 + int.from_bytes(data[:8], "little")
    meta = data.index(b'"meta":')
    return {
        "length": range(8),
        "digests": range(8, meta),
        "meta": range(meta, data.index(b'"}', meta)),
        "entries": range(data.index(b'"}', meta), head),
        "tensors": range(head, len(data)),
    }


def accepted(path, region, place):
    load_checkpoint(path)
    pytest.fail(f"a flip in {region} at byte {place} was accepted")


def test_every_kind_of_bit_flip_is_refused(tmp_path):
    path = tmp_path / "c"
    save_checkpoint(path, some_tensors(), META)
    data = path.read_bytes()
    draw = random.Random(0)
    for region, places in regions(data).items():
        for place in draw.choices(places, k=60):
            altered = bytearray(data)
            altered[place] ^= 1 << draw.randrange(8)
            path.write_bytes(altered)
            with pytest.raises(CheckpointError, match="cut short or altered"):
                accepted(path, region, place)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "c"
    save_checkpoint(path, some_tensors(), META)
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    for end in (0, 1, 7, 8, 9, 40, 100, head - 9, head - 1, head, head + 1, len(data) - 8, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError, match="cut short or altered"):
            load_checkpoint(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="cut short or altered"):
        load_checkpoint(path)


def test_swapped_parts_of_two_checkpoints_are_refused(tmp_path):
    save_checkpoint(tmp_path / "a", {"w": torch.zeros(4)}, {"round": 1})
    save_checkpoint(tmp_path / "b", {"w": torch.ones(4)}, {"round": 2})
    a, b = (tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()
    (tmp_path / "a").write_bytes(a[:-16] + b[-16:])
    with pytest.raises(CheckpointError, match="tensors do not match"):
        load_checkpoint(tmp_path / "a")


def test_an_ordinary_safetensors_file_is_refused(tmp_path):
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "model")
    with pytest.raises(CheckpointError, match="not one that sparing writes"):
        load_checkpoint(tmp_path / "model")


def test_another_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FORMAT_VERSION", "5")
    save_checkpoint(tmp_path / "c", {}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 5, this release reads format 4; resume with the release"):
        load_checkpoint(tmp_path / "c")
    monkeypatch.setattr(checkpoint, "_FORMAT_VERSION", "2")
    save_checkpoint(tmp_path / "old", {}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2, this release reads format 4; resume with the release"):
        load_checkpoint(tmp_path / "old")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_checkpoint(tmp_path / "no" / "c", {}, {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path)


def test_what_cannot_be_saved_leaves_the_old_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": torch.ones(1)}, {"round": 1})
    with pytest.raises(CheckpointError, match="plain JSON"):
        save_checkpoint(tmp_path / "c", {}, {"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"'z' has dtype torch\.complex64"):
        save_checkpoint(tmp_path / "c", {"z": torch.ones(1, dtype=torch.complex64)}, {})
    with pytest.raises(CheckpointError, match="another one"):
        save_checkpoint(tmp_path / "c", {"__metadata__": torch.ones(1)}, {})
    assert load_checkpoint(tmp_path / "c")[1] == {"round": 1}


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", {"w": torch.ones(1)}, {"round": 1})

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path / "c", {"w": torch.zeros(1)}, {"round": 2})
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "c")[1] == {"round": 1}


def test_saving_holds_no_second_copy(tmp_path):
    tensors = {str(i): torch.zeros(1 << 20) for i in range(8)}
    tracemalloc.start()
    save_checkpoint(tmp_path / "c", tensors, {})
    _, saving = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    load_checkpoint(tmp_path / "c")
    _, loading = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert saving < 1 << 20
    assert loading < 1 << 20  # beside the tensors themselves, which torch allocates


def test_the_header_is_plain_to_read(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": torch.ones(2)}, {"round": 7})
    data = (tmp_path / "c").read_bytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert json.loads(head["__metadata__"]["meta"]) == {"round": 7}
