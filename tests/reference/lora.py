"""Adapters in float64 NumPy, from the formulas alone: an upload is (B, A, scale, weight), weights summing to 1."""


def product(b, a, scale):
    return scale * b @ a


def mean_product(uploads):
    return sum(w * product(b, a, s) for b, a, s, w in uploads)


def average(uploads):
    return sum(w * b for b, _, _, w in uploads), sum(w * a for _, a, _, w in uploads)


def freeze_a(uploads, old, scale):
    """B alone, in the server's scale, each column over those who have it; where nobody has it, the old one."""
    new = old.copy()
    for i in range(old.shape[1]):
        has = [(w, s / scale * b[:, i]) for b, _, s, w in uploads if b.shape[1] > i]
        if has:
            new[:, i] = sum(w * x for w, x in has) / sum(w for w, _ in has)
    return new
