import pytest
import torch

from sparing.core.errors import MethodError
from sparing.core.tree import Layout
from sparing.parts.share.personal import (
    head_tensors,
    matching_tensors,
    personal_share,
    personal_tensors,
    stay_home_share,
)
from support import make_ctx, small_layout

LAYOUT = small_layout()


def test_the_head_is_the_last_layer():
    assert head_tensors(LAYOUT) == {"3.weight", "3.bias"}


def test_personal_and_shared_make_up_the_model():
    share = personal_share(LAYOUT, ["1"])
    shared = set(share.down({}, {}, make_ctx([0])))
    assert shared | share.own == set(LAYOUT.shapes)
    assert not shared & share.own
    assert {"1.weight", "1.running_mean", "1.num_batches_tracked"} <= share.own, "buffers go with their layer"


def test_names_match_whole_components():
    names = ["features.bn1.weight", "features.bn10.weight", "fc.weight"]
    layout = Layout(dict.fromkeys(names, (1,)), dict.fromkeys(names, torch.float32))
    assert matching_tensors(layout, ["bn1"], "x") == {"features.bn1.weight"}
    assert matching_tensors(layout, ["features"], "x") == {"features.bn1.weight", "features.bn10.weight"}
    assert matching_tensors(layout, ["features.bn10", "fc"], "x") == {"features.bn10.weight", "fc.weight"}


def test_a_name_that_matches_nothing_is_refused_with_the_nearest():
    names = ["features.conv1.weight", "classifier.weight"]
    layout = Layout(dict.fromkeys(names, (1,)), dict.fromkeys(names, torch.float32))
    with pytest.raises(MethodError, match="'clasifier' matches no layer; did you mean 'classifier'"):
        personal_share(layout, ["clasifier"])
    with pytest.warns(UserWarning, match="'head' matches no layer"):
        assert personal_share(layout, ["head", "classifier"]).own == {"classifier.weight"}


NAMES = ["conv.weight", "bn1.weight", "bn1.running_mean", "bn10.weight", "head.weight", "head.bias"]
NETWORK = Layout(dict.fromkeys(NAMES, (2,)), dict.fromkeys(NAMES, torch.float32), frozenset({"bn1.running_mean"}))


@pytest.mark.parametrize(
    ("layers", "shared", "home"),
    [
        (None, None, {"head.weight", "head.bias"}),
        (["bn1"], None, {"bn1.weight", "bn1.running_mean"}),
        (["bn1.weight"], None, {"bn1.weight", "bn1.running_mean"}),
        (None, ["conv", "bn1", "bn10"], {"head.weight", "head.bias"}),
        (["head", "bn10"], ["conv", "bn1"], {"head.weight", "head.bias", "bn10.weight"}),
        ([], None, set()),
        (None, [], set(NAMES)),
    ],
)
def test_one_list_leaves_the_rest_to_the_other(layers, shared, home):
    found = personal_tensors(NETWORK, layers, shared)
    assert found == home
    share = stay_home_share(NETWORK, found)
    cuts = share.down({}, {}, make_ctx([0]))
    assert cuts.keys() | share.own == set(NAMES)
    assert not cuts.keys() & share.own
    assert share.up(cuts, make_ctx([0])) == cuts


@pytest.mark.parametrize(
    ("layers", "shared", "words"),
    [
        (["head", "conv"], ["conv", "bn1", "bn10"], "'conv.weight' is in both of the shared and the personal layers"),
        (["head"], ["conv", "bn1"], "'bn10.weight' is in neither"),
        (["haed"], None, "personal layers: 'haed' matches no layer; did you mean 'head'"),
        (None, ["conf"], "shared layers: 'conf' matches no layer; did you mean 'conv'"),
    ],
)
def test_lists_that_cannot_be_meant(layers, shared, words):
    with pytest.raises(MethodError, match=words):
        personal_tensors(NETWORK, layers, shared)


def test_one_name_astray_is_a_warning():
    with pytest.warns(UserWarning, match="shared layers: 'bn2' matches no layer; did you mean 'bn1'"):
        assert personal_tensors(NETWORK, shared=["conv", "bn2"]) == set(NAMES) - {"conv.weight"}
