"""Image models of transformers, timm and torchvision, as their authors wrote them."""

import pytest
import torch

import sparing

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention, under vmap


def hugging_face_vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16,
        num_channels=3, num_labels=3, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def timm_vit():
    size = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=3, **size)


def timm_resnet():
    return timm.create_model("resnet10t", pretrained=False, num_classes=3)


def torchvision_resnet():
    return torchvision.models.resnet18(weights=None, num_classes=3, norm_layer=lambda c: torch.nn.GroupNorm(2, c))


def torchvision_mobilenet():
    return torchvision.models.mobilenet_v3_small(weights=None, num_classes=3)


def pictures(n, seed, named):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.rand(n, 3, 32, 32, generator=g), torch.arange(n) % 3
    x[torch.arange(n), y] += 1
    return ({"pixel_values": x} if named else x), y


def run(model, path, named=False, **local):
    task = sparing.Task(model, [pictures(6 + i, i, named) for i in range(3)], pictures(9, 9, named))
    local = {"epochs": 1, "batch": 4, "lr": 0.01, **local}
    return sparing.run(task, rounds=1, sample=2, seed=1, local=local, plan={"path": path})


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
@pytest.mark.parametrize("named", [False, True])
def test_vit_of_transformers(path, named):
    one, other = run(hugging_face_vit, "loop"), run(hugging_face_vit, path, named)
    assert one.up_bytes == other.up_bytes
    for name, x in one.model.items():
        torch.testing.assert_close(other.model[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
@pytest.mark.parametrize("model", [timm_vit, torchvision_resnet])
def test_models_without_running_statistics(model, path):
    one, other = run(model, "loop"), run(model, path)
    assert one.up_bytes == other.up_bytes > 0
    for name, x in one.model.items():
        torch.testing.assert_close(other.model[name], x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", [timm_resnet, torchvision_mobilenet])
def test_models_with_batch_norm(model):
    one = run(model, "loop-fast")
    assert one.loss == one.loss
    assert one.up_bytes > 4 * 2 * sum(p.numel() for p in model().parameters())
