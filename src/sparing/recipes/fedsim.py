from sparing.core.compose import weighed_by
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import fedsim as similarity


@recipe("fedsim", paper="similarity-weighted averaging")
def fedsim(q: float = 1.0, on: str = "weights", softmax: float | None = None, at: str = "server") -> Recipe:
    """Weight each client by its model's cosine similarity to the server's, times its sample count to the power q."""

    def apply(method: Method) -> Method:
        return weigh_by_similarity(method, frozenset(), q, on, softmax, at)

    return apply


def weigh_by_similarity(
    method: Method, home: frozenset[str], q: float, on: str, softmax: float | None, at: str
) -> Method:
    how = similarity.Similarity(q, on, softmax, at)
    weigh = similarity.similarity_weigh(method.layout, home, how, method.summed is not None)
    up = (similarity.cosine_note_codec(method.layout, home), *method.up) if at == "client" else method.up
    method = weighed_by(method._replace(up=up), weigh)
    if on == "weights":
        return method
    return method._replace(blend=method.blend._replace(steps=(similarity.agreement_step(q), *method.blend.steps)))
