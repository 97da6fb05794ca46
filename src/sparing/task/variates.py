"""Control variates (SCAFFOLD): what keeps clients from drifting apart while they train.

Every step of client k is corrected by c - c_k. After T steps from x to y, c_k becomes c_k - c + (x - y) / (T lr): the
mean gradient it has just seen, and the change travels to the server, whose c is the mean of all c_k.
"""

import torch
from torch import Tensor

from sparing.core.keys import Ctx
from sparing.core.protocols import Local, Phase
from sparing.core.tree import Tree, column

SUFFIX = ".control"


def pull(start: Tree, memory: Tree) -> Tree:
    """c - c_k for every tensor that has a control variate, `[K, *shape]`."""
    names = [name.removesuffix(SUFFIX) for name in start if name.endswith(SUFFIX)]
    return {name: start[name + SUFFIX] - memory[f"control/{name}"] for name in names}


def renewed(start: Tree, after: Tree, memory: Tree, local: Local, ctx: Ctx) -> Tree:
    """The client's control variates are renewed in `memory`; what goes up is the server's plus the change."""
    out: Tree = {}
    scale_K = sum(phase.lr * steps_of(phase, ctx) for phase in local.phases)
    for name, x in start.items():
        if name.endswith(SUFFIX):
            plain = name.removesuffix(SUFFIX)
            mine = memory[f"control/{plain}"]
            new = mine - x + (start[plain] - after[plain]) / column(torch.as_tensor(scale_K), after[plain])
            memory[f"control/{plain}"] = new
            out[name] = x + (new - mine)
    return out


def steps_of(phase: Phase, ctx: Ctx) -> Tensor:
    """Steps each client takes, `[K]` float32."""
    if phase.steps is not None:
        return torch.full_like(ctx.n, phase.steps, dtype=torch.float32)
    return (-(-ctx.n // phase.batch) * phase.epochs).to(torch.float32)
