"""Control variates (SCAFFOLD): what keeps clients from drifting apart while they train.

Every step of client k is corrected by c - c_k. After T steps from x to y, c_k becomes c_k - c + (x - y) / (T lr): the
mean gradient it has just seen. The change travels to the server, whose c is the mean of all c_k.
"""

import torch

from sparing.core.keys import Ctx
from sparing.core.protocols import Local
from sparing.core.tree import Trained, Tree, column, under
from sparing.train.batches import phase_steps


def pull(start: Tree, memory: Tree) -> Tree:
    """c - c_k for every tensor that has a control variate, `[K, *shape]`."""
    return {name: start[f"{name}.control"] - mine for name, mine in under("control", memory).items()}


def renewed_variates(start: Tree, after: Trained, memory: Tree, local: Local, ctx: Ctx) -> Tree:
    """The client's control variates are renewed in `memory`; what goes up is the server's plus the change."""
    out: Tree = {}
    counts = ctx.n.tolist()
    reach = [(phase, [phase.lr * steps for steps in phase_steps(phase, counts)]) for phase in local.phases]
    for name, mine in under("control", memory).items():
        moved = [lengths for phase, lengths in reach if phase.trains is None or name in phase.trains]
        server, new = start[f"{name}.control"], mine
        if moved:
            length_K = torch.tensor([sum(parts) for parts in zip(*moved, strict=True)], dtype=mine.dtype)
            gradient = (start[name] - after[name]) / column(length_K.to(mine.device), mine)
            new = memory[f"control/{name}"] = (mine - server + gradient).to(mine.dtype)
        out[f"{name}.control"] = server + (new - mine)
    return out
