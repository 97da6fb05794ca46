import pytest
import torch

from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Codec, Step
from sparing.core.registry import find, known
from sparing.run.config import method_list
from sparing.run.methods import recipes
from support import small_layout

LAYOUT = small_layout()


def stage(name, *traits):
    codec = Codec(lambda p, s, v: (p, s), name=name, lossy=True, traits=frozenset(traits))
    return lambda method: method._replace(up=(*method.up, codec))


def made(spec):
    return compose(LAYOUT, *recipes(method_list(spec)))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fp16+int8", "'int8' cannot follow another quantiser"),
        ("int8+dgc", "'dgc' needs values, not the codes of a quantiser"),
        ("memory", "memory has nothing to remember.*topk"),
        ("psfed+memory", "memory has nothing to remember"),
        ([{"randk": {"unbiased": True}}, "memory"], "unbiased: false"),
        (["int8", {"randk": {"unbiased": True}}], "cannot scale codes"),
    ],
)
def test_unsound_lists_are_refused_with_the_fix(spec, words):
    with pytest.raises(MethodError, match=words):
        made(spec)


def test_unsound_stages_are_refused_by_their_traits():
    memory = find("memory").make()
    with pytest.raises(MethodError, match=r"'svd' changes the basis.*put it first"):
        compose(LAYOUT, find("topk").make(), stage("svd", "basis"))
    with pytest.raises(MethodError, match="its basis rotates every round"):
        compose(LAYOUT, stage("svd", "rotates"), memory)
    with pytest.raises(MethodError, match="'ef21' keeps its own memory"):
        compose(LAYOUT, stage("ef21", "remembers"), memory)


def test_a_step_that_needs_the_mean_is_refused_over_collect():
    def collecting(method):
        step = Step(lambda s, b, c: (b.update, s, {}), name="stein", needs_mean=True)
        return method._replace(blend=method.blend._replace(collect=lambda v, m, w: v[0], steps=(step,)))

    with pytest.raises(MethodError, match="'stein' needs a weighted mean"):
        compose(LAYOUT, collecting)


def test_order_in_the_list_is_order_of_execution():
    assert [codec.name for codec in made("topk+int8").up] == ["topk", "int8"]
    assert [codec.name for codec in made("int8+topk").up] == ["int8", "topk"]


def test_unknown_names_and_options_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown method 'topkk'; did you mean 'topk'"):
        made("psfed+topkk")
    with pytest.raises(ConfigError, match="'topk' has no option 'ration'; did you mean 'ratio'"):
        made([{"topk": {"ration": 0.1}}])
    with pytest.raises(ConfigError, match=r"topk.ratio is 'many'"):
        made([{"topk": {"ratio": "many"}}])
    with pytest.raises(ConfigError, match="'fedavg' has no option 'x'; it takes none"):
        made([{"fedavg": {"x": 1}}])
    with pytest.raises(ConfigError, match="write a name"):
        made([{"topk": {"ratio": 0.1}, "int8": {}}])


def test_every_recipe_says_what_it_is():
    for name, entry in known().items():
        assert entry.about, name
        assert entry.paper, name


def test_methods_work_on_models_without_buffers_and_with_scalars():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor(1.0))

    from sparing.core.tree import layout_of

    compose(layout_of(Odd()), *recipes(["topk", "int8", "memory"]))
