"""One layer's adapter through whole rounds of the library, with made-up training: what went down, what came up."""

import numpy as np
import torch
from torch import nn

from sparing.core.compose import compose, remake_model
from sparing.core.method import Trained
from sparing.core.round import begin, client, first_server, incoming, outgoing, settle
from sparing.core.tree import layout_of, tree_of
from sparing.engines.engine import chunks_of_size
from sparing.recipes.lora import lora
from sparing.runs.recipe_entries import recipes_from_entries
from support import make_ctx

SAMPLES = [10, 25, 7, 40, 12, 33]
A, B, MERGED = "q.lora_a.weight", "q.lora_b.weight", "q.merged.weight"


class Net(nn.Module):
    def __init__(self, kernel=None):
        super().__init__()
        self.q = nn.Linear(9, 7) if kernel is None else nn.Conv2d(3, 7, kernel)
        self.head = nn.Linear(7, 2)

    def forward(self, x):
        return self.head(self.q(x))


def flat(x):
    """A factor as a matrix."""
    return x.reshape(len(x), -1)


class Play:
    """A federation of which every client adds what a generator of its own draws, or what it is told to."""

    def __init__(self, kernel=None, dtype=torch.float64, moves=None, seed=0, beside=(), **options):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = Net(kernel).to(dtype)
        self.base = net.q.weight.detach().double().numpy().copy()
        made = lora(targets=["q"], **options)
        net = remake_model(net, [made], seed=seed)
        self.method = compose(layout_of(net), made, *recipes_from_entries(list(beside)))
        self.server = first_server(self.method, tree_of(net, layout_of(net)), len(SAMPLES))
        self.net, self.moves, self.round, self.report = net, moves or drawn_moves, 0, {}
        self.sent: dict[int, dict] = {}
        self.uploads: dict[int, dict] = {}
        self.travelled: list[set[str]] = []
        self.learned: tuple[torch.Tensor, ...] = ()
        self.scale = net.get_submodule("q").scale

    def factors(self):
        """The server's, as matrices; A is the frozen one where it never travels."""
        model = {name: x[0] for name, x in self.server.model.items()}
        a = model.get(A, self.net.state_dict()[A])
        return flat(model[B].double().numpy()), flat(a.detach().double().numpy())

    def merged(self):
        """What the server has added to the frozen weight, as a matrix."""
        found = self.server.model.get(MERGED)
        return np.zeros((1, 1)) if found is None else flat(found[0].double().numpy())

    def product(self):
        """All that the server has learned, adapters and what is merged."""
        b, a = self.factors()
        return self.scale * b @ a + self.merged()

    def train(self, lesson, ctx):
        k = len(ctx.ids)
        after = {name: x.expand(k, *x.shape[1:]).clone() for name, x in lesson.start.items()}
        for row, who in enumerate(ctx.ids.tolist()):
            self.sent[who] = {n: flat(x[row].double().numpy().copy()) for n, x in after.items() if n in (A, B)}
            for name, x in after.items():
                move = self.moves(who, name, tuple(x.shape[1:]), self.round)
                x[row] += torch.from_numpy(np.ascontiguousarray(move)).to(x)
            self.uploads[who] = {n: flat(x[row].double().numpy().copy()) for n, x in after.items() if n in (A, B)}
        return Trained(after, lesson.memory, no_loss(ctx))

    def play(self, ids, chunk=8, descend=None):
        """`descend`: training in place of what clients add."""
        self.round += 1
        self.sent, self.uploads = {}, {}
        training = (
            self.train if descend is None else lambda lesson, ctx: Trained(descend(lesson, ctx), {}, no_loss(ctx))
        )
        ctx = make_ctx(ids, [SAMPLES[i] for i in ids], t=self.round, clients=len(SAMPLES))
        fold = begin(self.method, self.server, ctx)
        for part in chunks_of_size(ctx, chunk, self.method.fit):
            down = outgoing(self.method, self.server, part)
            up, _ = client(self.method, {}, down, training, part)
            self.travelled += [set(down.leaves), set(up.leaves)]
            incoming(self.method, self.server, fold, down, up, part)
        self.server, self.report = settle(self.method, self.server, fold, ctx)
        return self

    def arrivals(self, ids, scale_of):
        """(B, A, scale, weight) of these clients in id order; `scale_of` their rank."""
        _, frozen = self.factors()
        total = sum(SAMPLES[i] for i in ids)
        found = []
        for i in sorted(ids):
            b, a = self.uploads[i][B], self.uploads[i].get(A)
            a = frozen[: b.shape[1]] if a is None else a
            found.append((b, a, scale_of(b.shape[1]), SAMPLES[i] / total))
        return found


def no_loss(ctx):
    return {"loss": torch.zeros(len(ctx.ids))}


def drawn_moves(who, name, shape, t):
    return 0.1 * np.random.default_rng([who, len(name), t]).standard_normal(shape)
