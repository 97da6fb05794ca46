"""A second model on every client (Ditto), NAME.second: its own, never sent, at first the initial model.

It trains after the shared one, drawn to where that one started, and is what the client uses.
"""

from sparing.core.context import Ctx
from sparing.core.method import Lesson, Phase, Share, Train, Trained, Wrap
from sparing.core.tree import Tree

SUFFIX = "second"


def second_model_share(names: list[str]) -> Share:
    """The second model of these tensors stays at home."""
    mine = frozenset(f"{name}.{SUFFIX}" for name in names)
    return Share(down=lambda state, model, ctx: {}, up=lambda got, ctx: {}, own=mine, private=mine)


def second_model_copy(model: Tree, names: list[str]) -> Tree:
    return {f"{name}.{SUFFIX}": model[name] for name in names}


def second_model_as_first(tree: Tree) -> Tree:
    """The second model under the names of the first."""
    return {name: tree.get(f"{name}.{SUFFIX}", x) for name, x in tree.items()}


def train_second_model(phases: tuple[Phase, ...]) -> Wrap:
    """Around local training: the second model trains by these phases."""

    def around(train: Train, phases: tuple[Phase, ...]) -> Train:
        def both(lesson: Lesson, ctx: Ctx) -> Trained:
            start = lesson.start
            first = train(lesson, ctx)
            second, *_ = train(Lesson(second_model_as_first(start), {}, phases, anchor=start), ctx)
            mine = {f"{name}.{SUFFIX}": second[name] for name in start if f"{name}.{SUFFIX}" in start}
            return first._replace(after={**first.after, **mine})

        return both

    return Wrap(around, phases)
