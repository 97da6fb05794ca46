from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.train import phases as parts


@recipe("finetune", paper="fine-tuning after FedAvg, as in Yu et al. 2020, arXiv:2002.04758")
def finetune(epochs: int | None = None, lr: float | None = None) -> Recipe:
    """Fine-tune a copy of the model on each client before evaluation; training itself is unchanged."""
    tune = parts.tuning_phases(epochs, lr, None, "finetune")

    def apply(method: Method) -> Method:
        if method.local.wrapped_phases or method.local.tune:
            raise MethodError("finetune and a recipe before it both say which model a client uses; drop one of them")
        return method._replace(local=method.local._replace(tune=tune))

    return apply
