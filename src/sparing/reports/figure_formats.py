"""The formats of figures as files; read without anything that draws."""

from sparing.core.errors import ConfigError

FIGURE_FORMATS = ("png", "svg", "pdf")


def read_figure_formats(text: str) -> list[str]:
    """
    >>> read_figure_formats("png, pdf")
    ['png', 'pdf']
    """
    kinds = [word.strip() for word in text.split(",")]
    strange = next((word for word in kinds if word not in FIGURE_FORMATS), None)
    if strange is not None:
        raise ConfigError(f"--format has {strange!r}; use {', '.join(FIGURE_FORMATS)}, with commas between several")
    return kinds
