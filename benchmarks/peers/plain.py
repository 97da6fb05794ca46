"""A plain loop: one model; per client load the weights, train, add to the mean."""

import torch
from peers.child import Serve, Spec
from torch import Tensor
from torch.nn.functional import cross_entropy


def enter(spec: Spec, serve: Serve) -> None:
    shape = spec.shape
    x, y = (part.to(spec.device) for part in shape.data(spec.seed))
    model = shape.model().to(spec.device).train()
    trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
    weights = list(trained.values())
    server = [w.detach().clone() for w in weights]
    total = [torch.zeros_like(w) for w in server]
    g = torch.Generator().manual_seed(spec.seed)

    def one_client(i: int) -> None:
        with torch.no_grad():
            torch._foreach_copy_(weights, server)
        for _ in range(shape.epochs):
            order = torch.randperm(shape.samples, generator=g).to(spec.device)
            a, b = x[i][order], y[i][order]
            for at in range(0, shape.samples, shape.batch):
                loss = cross_entropy(model(a[at : at + shape.batch]), b[at : at + shape.batch])
                step(torch.autograd.grad(loss, weights))

    @torch.no_grad()
    def step(gradient: tuple[Tensor, ...]) -> None:
        torch._foreach_add_(weights, gradient, alpha=-shape.lr)

    def rounds(n: int) -> None:
        for _ in range(n):
            torch._foreach_zero_(total)
            for i in torch.randperm(shape.clients, generator=g)[: shape.cohort].tolist():
                one_client(i)
                with torch.no_grad():
                    torch._foreach_add_(total, weights, alpha=1 / shape.cohort)
            torch._foreach_copy_(server, total)

    serve(rounds, lambda: dict(zip(trained, server, strict=True)))
