import pytest
import torch

from sparing.core.errors import MethodError
from sparing.core.tree import Layout
from sparing.parts.layers import head, matching, personal
from support import make_ctx, small_layout

LAYOUT = small_layout()


def test_the_head_is_the_last_layer():
    assert head(LAYOUT) == {"3.weight", "3.bias"}


def test_personal_and_shared_make_up_the_model():
    share = personal(LAYOUT, ["1"])
    shared = set(share.down({}, {}, make_ctx([0])))
    assert shared | share.own == set(LAYOUT.shapes)
    assert not shared & share.own
    assert {"1.weight", "1.running_mean", "1.num_batches_tracked"} <= share.own, "buffers go with their layer"


def test_names_match_whole_components():
    names = ["features.bn1.weight", "features.bn10.weight", "fc.weight"]
    layout = Layout(dict.fromkeys(names, (1,)), dict.fromkeys(names, torch.float32))
    assert matching(layout, ["bn1"], "x") == {"features.bn1.weight"}
    assert matching(layout, ["features"], "x") == {"features.bn1.weight", "features.bn10.weight"}
    assert matching(layout, ["features.bn10", "fc"], "x") == {"features.bn10.weight", "fc.weight"}


def test_a_name_that_matches_nothing_is_refused_with_the_nearest():
    names = ["features.conv1.weight", "classifier.weight"]
    layout = Layout(dict.fromkeys(names, (1,)), dict.fromkeys(names, torch.float32))
    with pytest.raises(MethodError, match="'clasifier' matches no layer; did you mean 'classifier'"):
        personal(layout, ["clasifier"])
    with pytest.warns(UserWarning, match="'head' matches no layer"):
        assert personal(layout, ["head", "classifier"]).own == {"classifier.weight"}
