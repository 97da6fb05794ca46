from sparing.core.compose import narrow_share
from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.share import personal as parts
from sparing.parts.train import phases


@recipe("fedrep", paper="Collins et al. 2021, arXiv:2102.07078")
def fedrep(
    layers: list[str] | None = None, shared: list[str] | None = None, head: int | None = None, body: int | None = 1
) -> Recipe:
    """Keep the head (by default the last layer) on the client; train the head first, then the shared body alone."""

    def apply(method: Method) -> Method:
        share = narrow_share(method.share, parts.personal_share(method.layout, layers, shared))
        mine = share.private & frozenset(method.layout.params)
        rest = frozenset(method.layout.params) - mine
        if not mine or not rest:
            raise MethodError("fedrep needs layers for the head and layers for the body; name some of each")
        trained = phases.head_then_body(method.local.phases, mine, rest, head, body)
        return method._replace(share=share, local=method.local._replace(phases=trained))

    return apply
