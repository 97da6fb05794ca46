from typing import Literal

from sparing.core.compose import narrow_share
from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.share import personal as parts
from sparing.parts.train import phases


@recipe("fedbabu", paper="Oh et al. 2021, arXiv:2106.06042")
def fedbabu(
    layers: list[str] | None = None,
    shared: list[str] | None = None,
    tune: Literal["all", "head", "body"] = "all",
    epochs: int | None = None,
    lr: float | None = None,
) -> Recipe:
    """Train and share only the body, with the head frozen as initialised; fine-tune a copy before evaluation."""

    def apply(method: Method) -> Method:
        if method.local.wrapped_phases or method.local.tune:
            raise MethodError("fedbabu and a recipe before it both say which model a client uses; drop one of them")
        home, params = parts.personal_tensors(method.layout, layers, shared), frozenset(method.layout.params)
        parted = {"all": None, "head": params & home, "body": params - home}
        if not params - home or parted[tune] == frozenset():
            raise MethodError(f"fedbabu trains the body and tunes {tune}, but no layer is left for it; name some")
        local = method.local._replace(
            phases=phases.train_only(method.local.phases, params - home, "fedbabu"),
            tune=phases.tuning_phases(epochs, lr, parted[tune], "fedbabu"),
        )
        return method._replace(
            share=narrow_share(method.share, parts.stay_home_share(method.layout, home)), local=local
        )

    return apply
