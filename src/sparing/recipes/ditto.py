from sparing.core.compose import join_shares_beside
from sparing.core.errors import ConfigError, MethodError, check_range
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.core.tree import Tree, with_extra
from sparing.parts.train import phases as parts
from sparing.parts.train import second_model


@recipe("ditto", paper="Li et al. 2020, arXiv:2012.04221")
def ditto(lam: float = 0.1, epochs: int | None = None, lr: float | None = None) -> Recipe:
    """Each client also trains a personal model, regularised towards the shared one, and is evaluated with it."""
    check_range("ditto.lam", lam, 0, float("inf"))
    if lr is not None and not lr > 0:
        raise ConfigError(f"ditto.lr is {lr}; it must be above 0")

    def apply(method: Method) -> Method:
        if method.local.wrapped_phases or method.local.tune:
            raise MethodError("ditto and a recipe before it both say which model a client uses; drop one of them")
        names, first = [name for name in method.layout.shapes if name not in method.layout.extra], method.extra

        def extra(model: Tree) -> Tree:
            more = first(model)
            return more | second_model.second_model_copy(model | more, names)

        return method._replace(
            layout=with_extra(method.layout, names, second_model.SUFFIX),
            share=join_shares_beside(method.share, second_model.second_model_share(names)),
            extra=extra,
            local=method.local._replace(
                wraps=(
                    *method.local.wraps,
                    second_model.train_second_model(parts.pulled_phases(method.local.phases, lam, epochs, lr)),
                ),
                used=second_model.second_model_as_first,
            ),
        )

    return apply
