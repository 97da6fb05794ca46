"""Networks by name: as many parameters as published, and every one trains stacked as it does alone."""

import pytest
import torch
from torch import nn

from sparing.accel.train_choice import fastest_path
from sparing.core.context import context
from sparing.core.errors import ConfigError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import take_rows, tree_of, tree_sha256
from sparing.data.clients import Clients
from sparing.models import MODELS, build_network, register_model
from sparing.models.norms import norm2d
from sparing.models.resnet import BasicBlock, BottleneckBlock, resnet
from sparing.models.vgg import vgg
from sparing.train.evaluate import evaluate_all, evaluate_rows
from sparing.train.local import train
from sparing.train.losses import cross_entropy

CIFAR, IMAGENET, MNIST = (3, 32, 32), (3, 224, 224), (1, 28, 28)
COUNTS = [
    ("mlp", {"hidden": [200, 200]}, MNIST, 10, 199_210),  # "2NN" of the FedAvg paper
    ("mlp", {"hidden": []}, (4,), 3, 15),
    ("cnn", {}, (1, 8, 8), 10, 13_706),
    ("fedavg-cnn", {}, MNIST, 10, 1_663_370),
    ("lenet5", {}, MNIST, 10, 61_706),
    ("lenet5", {}, CIFAR, 10, 62_006),
    ("resnet18", {}, CIFAR, 10, 11_173_962),
    ("resnet34", {}, CIFAR, 100, 21_328_292),
    ("resnet50", {}, IMAGENET, 1000, 25_557_032),
    ("resnet18", {}, IMAGENET, 1000, 11_689_512),
    ("resnet34", {}, IMAGENET, 1000, 21_797_672),
    ("resnet50", {}, CIFAR, 10, 23_520_842),
    ("vgg11", {}, CIFAR, 10, 9_231_114),
    ("vgg19", {}, CIFAR, 10, 20_040_522),
    ("lstm", {}, (80,), 90, 820_522 + 4 * 512),  # as in TensorFlow Federated, but torch has two biases per gate
    ("transformer", {}, (80,), 90, (90 + 80) * 128 + 2 * (12 * 128**2 + 13 * 128) + 2 * 128 + 129 * 90),
]
NORMS = ("group", "batch", "static")


def count(*args, **options) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_network(*args, **options).parameters())


@pytest.mark.parametrize(("name", "options", "shape", "classes", "wanted"), COUNTS)
def test_parameter_counts(name, options, shape, classes, wanted):
    for norm in NORMS if name.startswith(("resnet", "vgg")) else ("",):
        assert count({name: options}, shape, classes, **({"norm": norm} if norm else {})) == wanted


def test_counts_of_the_low_rank_papers():
    assert (round(count("resnet34", CIFAR, 100) / 1e6, 3), round(count("resnet18", CIFAR, 10) / 1e6, 3)) == (
        21.328,
        11.174,
    )


def shape_of(name: str | dict, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What comes out for two samples and five classes, without computing it."""
    tokens = name in ("lstm", "transformer")
    with torch.device("meta"):
        return tuple(build_network(name, shape, 5)(torch.zeros(2, *shape, dtype=torch.int64 if tokens else None)).shape)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"hf"}))
def test_every_network_ends_in_its_head(name):
    shape = (7,) if name in ("lstm", "transformer") else CIFAR
    with torch.device("meta"):
        last, head = list(build_network(name, shape, 5).named_children())[-1]
    assert (last, head.out_features) == ("head", 5)
    assert shape_of(name, shape) == ((2, 5) if shape == CIFAR else (2, 7, 5))


def test_images_of_other_sizes():
    for name, shape in (
        ("resnet18", (1, 8, 8)), ("resnet50", (3, 72, 80)), ("vgg11", (3, 64, 32)), ("lenet5", (1, 12, 40)),
        ("fedavg-cnn", (1, 4, 9)),
    ):  # fmt: skip
        assert shape_of(name, shape) == (2, 5)
    with torch.device("meta"):
        stems = [
            build_network("resnet18", (3, 64, side), 5, stem=stem).stem
            for side, stem in ((64, "auto"), (65, "auto"), (64, "imagenet"), (65, "cifar"))
        ]
    assert [stem.conv.kernel_size[0] for stem in stems] == [3, 7, 7, 3]
    assert [len(stem) for stem in stems] == [3, 4, 4, 3]


def test_token_networks_do_not_look_ahead():
    x = torch.randint(9, (2, 6))
    later = torch.cat([x[:, :4], (x[:, 4:] + 1) % 9], 1)
    for name in ("lstm", "transformer"):
        net = build_network({name: {"layers": 1}}, (6,), 9)
        assert torch.allclose(net(x)[:, :4], net(later)[:, :4])
        assert not torch.allclose(net(x)[:, 4:], net(later)[:, 4:])
        net.last = True
        assert net(x).shape == (2, 9)
    assert fastest_path(build_network("lstm", (6,), 9), "cuda") == "loop-fast"
    assert fastest_path(build_network("transformer", (6,), 9), "cuda") == "stacked"


def test_group_norm_leaves_a_map_of_one_place_alone_with_its_kin():
    assert [norm2d("group", c).num_groups for c in (2, 4, 6, 48, 64, 2048)] == [1, 2, 1, 8, 32, 32]
    assert bool(norm2d("group", 8)(torch.rand(1, 8, 1, 1)).any())


def tokens(sizes=(5, 1, 9)) -> Clients:
    g = torch.Generator().manual_seed(0)
    return Clients.of([(torch.randint(7, (n, 6), generator=g), torch.randint(7, (n, 6), generator=g)) for n in sizes])


def images(sizes=(5, 1, 9), side=8) -> Clients:
    g = torch.Generator().manual_seed(0)
    return Clients.of(
        [(torch.randn(n, 2, side, side, generator=g).double(), torch.randint(3, (n,), generator=g)) for n in sizes]
    )


def trained(model, data, path="loop", ids=(0, 1, 2), buffers="shared"):
    ids = torch.tensor(ids)
    ctx = context(seed=5, round=2, rounds=9, ids=ids, n=data.count[ids], clients=len(data), samples=len(data.y))
    local = Local((Phase(epochs=2, batch=4, optimiser=Optimiser(lr=0.05, momentum=0.9)),), buffers)
    return train(model, cross_entropy, data, local, tree_of(model), ctx, path=path)[0]


NETS = {
    **{f"basic-{norm}": lambda norm=norm: resnet(BasicBlock, (1, 1), 2, 3, norm, width=4) for norm in NORMS},
    **{f"bottleneck-{norm}": lambda norm=norm: resnet(BottleneckBlock, (1, 1), 2, 3, norm, width=4) for norm in NORMS},
    "imagenet stem": lambda: resnet(BasicBlock, (1, 2), 2, 3, width=4, small=False),
    **{f"vgg-{norm}": lambda norm=norm: vgg(((4,), (8, 8)), 2, 3, norm) for norm in NORMS},
    "fedavg-cnn": lambda: build_network("fedavg-cnn", (2, 8, 8), 3),
    "transformer": lambda: build_network("transformer", (6,), 7, width=8, heads=2),
    "lstm": lambda: build_network("lstm", (6,), 7, hidden=8),
}


@pytest.mark.parametrize("name", NETS)
def test_stacked_as_in_the_loop_and_alone_as_in_a_cohort(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NETS[name]().double()
    data = tokens() if name in ("lstm", "transformer") else images()
    looped, stacked = trained(model, data), trained(model, data, "stacked")
    for leaf, x in looped.items():
        assert torch.allclose(stacked[leaf], x, rtol=1e-7, atol=1e-9), leaf
    for k in (0, 1):
        assert tree_sha256(take_rows(looped, slice(k, k + 1))) == tree_sha256(trained(model, data, ids=[k]))


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
def test_static_norm_is_batch_norm_with_static_buffers(path):
    """Also where a client has one sample and the last maps have one place."""
    static = resnet(BasicBlock, (1, 1, 1), 2, 3, "static", width=4).double()
    batch = resnet(BasicBlock, (1, 1, 1), 2, 3, "batch", width=4).double()
    batch.load_state_dict(static.state_dict(), strict=False)
    assert not list(static.buffers())
    data = images(side=4)
    mine, theirs = trained(static, data, path), trained(batch, data, path, buffers="static")
    assert all(torch.allclose(x, theirs[name]) for name, x in mine.items())
    own = evaluate_rows(static, cross_entropy, mine, data, torch.arange(3))
    assert torch.allclose(
        own["loss"], evaluate_rows(batch, cross_entropy, theirs, data, torch.arange(3), static=True)["loss"]
    )


def test_one_static_model_for_everybody_keeps_clients_apart():
    model, data = resnet(BasicBlock, (1, 1, 1), 2, 3, "static", width=4).double(), images(side=4)
    together = evaluate_rows(model, cross_entropy, tree_of(model), data, torch.arange(3))
    for k in range(3):
        alone = evaluate_rows(model, cross_entropy, tree_of(model), data, torch.tensor([k]))
        assert torch.equal(alone["loss"][0], together["loss"][k])
    one = evaluate_all(model, cross_entropy, tree_of(model), *data.client(1))
    assert one["loss"] == pytest.approx(float(together["loss"][1]))


def test_a_class_can_be_registered_and_its_options_are_known():
    class Wide(nn.Module):
        def __init__(self, shape, classes, width: int):
            super().__init__()
            self.head = nn.Linear(width, classes)

    register_model("wide")(Wide)
    try:
        assert build_network({"wide": {"width": "4"}}, (4,), 2).head.in_features == 4
        with pytest.raises(ConfigError, match=r"model 'wide' needs the option 'width': write \{wide: \{width: ...\}\}"):
            build_network("wide", (4,), 2)
    finally:
        MODELS.pop("wide")


BAD = {
    "no model is called 'resnet19': did you mean 'resnet1?8'": ("resnet19", CIFAR),
    "model 'mlp' has no option 'hiden'; did you mean 'hidden'": ({"mlp": {"hiden": [3]}}, CIFAR),
    "model 'cnn' has no option 'norm'; it takes none": ({"cnn": {"norm": "group"}}, CIFAR),
    "mlp.hidden is 'big': .* sequence": ({"mlp": {"hidden": "big"}}, CIFAR),
    r"mlp.hidden is \[0\]: .* greater than 0": ({"mlp": {"hidden": [0]}}, CIFAR),
    "resnet18.norm is 'layer': input should be 'group', 'batch' or 'static'": ({"resnet18": {"norm": "layer"}}, CIFAR),
    r"model is \['cnn'\]: write a name, or \{name: \{option: value\}\}": (["cnn"], CIFAR),
    r"resnet18 takes images .*, seen samples of shape \(5,\): use 'mlp'": ("resnet18", (5,)),
    r"cnn takes images .*, seen samples of shape \(5,\): use 'mlp', or 'lstm' or 'transformer'": ("cnn", (5,)),
    "vgg11 needs images of 32x32 or more, seen 28x28: use 'cnn'": ("vgg11", MNIST),
    r"lstm takes tokens \(length,\), seen samples of shape \(1, 28, 28\)": ("lstm", MNIST),
    "transformer.width is 9, which 4 heads cannot share": ({"transformer": {"width": 9}}, (6,)),
}


@pytest.mark.parametrize("sentence", BAD)
def test_models_that_cannot_be_meant(sentence):
    name, shape = BAD[sentence]
    with pytest.raises(ConfigError, match=sentence):
        build_network(name, shape, 10)
