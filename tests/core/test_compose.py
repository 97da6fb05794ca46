import pytest
import torch

from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import SPARSIFIES, TURNS, Codec, Effect, Form, Step, Trait
from sparing.core.registry import find_recipe, known_recipes
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list
from support import small_layout

LAYOUT = small_layout()


def stage(name, effect):
    codec = Codec(lambda p, s, v: (p, s), name=name, effect=effect)
    return lambda method: method._replace(up=(*method.up, codec))


def made(spec):
    return compose(LAYOUT, *recipes_from_entries(method_list(spec)))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fp16+int8", "'int8' needs values, and a quantiser before it gives codes; put it first, or keep one"),
        ("int8+dgc", "'dgc' needs values, and a quantiser before it gives codes; put it first"),
        ("memory", "memory has nothing to remember.*topk"),
        ("psfed+memory", "memory has nothing to remember"),
        ([{"randk": {"unbiased": True}}, "memory"], "unbiased: false"),
        (
            ["int8", {"randk": {"unbiased": True}}],
            "'randk' needs values, and a quantiser before it gives codes; put it first",
        ),
    ],
)
def test_unsound_lists_are_refused_with_the_fix(spec, words):
    with pytest.raises(MethodError, match=words):
        made(spec)


def test_unsound_stages_are_refused_by_what_they_do():
    memory, topk = find_recipe("memory").make(), find_recipe("topk").make()
    with pytest.raises(MethodError, match=r"'svd' changes the basis.*put it first"):
        compose(LAYOUT, topk, stage("svd", TURNS))
    for trait, words in {
        Trait.REMEMBERS: "'own' keeps its own memory",
        Trait.AMPLIFIES: "'own' scales its values up, which memory would amplify",
        Trait.NOISY: "the error of 'own' can be larger than the update",
    }.items():
        with pytest.raises(MethodError, match=words):
            compose(LAYOUT, stage("own", Effect(traits=trait)), memory)
        compose(LAYOUT, stage("own", Effect(traits=trait)))


ORDERS = {
    (Form.SPARSE, TURNS): "'second' changes the basis, so positions chosen before it mean nothing; put it first",
    (Form.CODES, TURNS): "'second' needs values, and a quantiser before it gives codes; put it first",
    (Form.BASIS, SPARSIFIES): "'second' cannot work on values in another basis",
    (Form.SUMS, SPARSIFIES): "'second' would change what clients remember and the server adds up; put it first",
    (Form.WRITTEN, SPARSIFIES): "'second' cannot change what is written already; put 'tight' last",
    (Form.SPARSE | Form.CODES | Form.WRITTEN, TURNS): "'second' cannot change what is written already",
}


@pytest.mark.parametrize(("given", "second"), ORDERS, ids=str)
def test_what_a_codec_gives_decides_what_may_follow(given, second):
    first, between = stage("first", Effect(given, Form.VALUES)), stage("between", Effect(refuses=Form.VALUES))
    for stages in ([first, stage("second", second)], [first, between, stage("second", second)]):
        with pytest.raises(MethodError, match=ORDERS[given, second]):
            compose(LAYOUT, *stages)
    compose(LAYOUT, stage("second", second._replace(gives=Form.VALUES)), first)


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
    for name, entry in known_recipes().items():
        assert entry.about, name
        assert entry.paper, name


def test_methods_work_on_models_without_buffers_and_with_scalars():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor(1.0))

    from sparing.core.tree import layout_of

    compose(layout_of(Odd()), *recipes_from_entries(["topk", "int8", "memory"]))
