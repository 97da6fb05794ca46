"""Local training, evaluation and gradients of any nn.Module: the plain way, one client after the other."""
