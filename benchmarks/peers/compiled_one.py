"""What the hardware gives: one model alone, compiled and captured as a CUDA graph, takes the steps of all clients.

In bfloat16 with channels last and float32 weights beside it, as `plan.precision=bf16` trains, or in what the plan says.
"""

import torch
from peers.child import Serve, Spec
from torch.nn.functional import cross_entropy


def enter(spec: Spec, serve: Serve) -> None:
    if not torch.cuda.is_available() or spec.device == "cpu":
        raise SystemExit("it needs CUDA")
    shape, precision = spec.shape, (spec.plan or {}).get("precision", "float32")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision != "float32"
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    model = shape.model().to(spec.device, kind, memory_format=torch.channels_last).train()
    near = [w for w in model.parameters() if w.requires_grad]
    weights = [w.detach().float() for w in near]
    x, y = (part[0, : shape.batch].to(spec.device) for part in shape.data(spec.seed))
    x = x.to(kind, memory_format=torch.channels_last)

    @torch.compile(fullgraph=True, dynamic=False)
    def loss() -> torch.Tensor:
        return cross_entropy(model(x).float(), y)

    def step() -> None:
        moves = [g.float() for g in torch.autograd.grad(loss(), near)]
        with torch.no_grad():
            torch._foreach_add_(weights, moves, alpha=-shape.lr)
            torch._foreach_copy_(near, weights)

    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()

    def rounds(n: int) -> None:
        for _ in range(n * shape.cohort * shape.epochs * -(-shape.samples // shape.batch)):
            graph.replay()

    serve(
        rounds,
        lambda: dict(zip((name for name, w in model.named_parameters() if w.requires_grad), weights, strict=True)),
    )
