from sparing.core.compose import narrow_share
from sparing.core.method import Method, Recipe, Share
from sparing.core.registry import recipe


@recipe("local", paper="the baseline without any federation")
def local() -> Recipe:
    """Share nothing: every client trains alone. The baseline that federated training has to beat."""

    def apply(method: Method) -> Method:
        home = frozenset(method.layout.shapes)
        alone = Share(down=lambda state, model, ctx: {}, up=lambda got, ctx: {}, own=home, private=home)
        return method._replace(share=narrow_share(method.share, alone))

    return apply
