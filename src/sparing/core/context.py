"""What both ends know in a round about the clients of a call.

>>> ctx = context(seed=0, round=3, rounds=10, ids=[4, 7], n=[20, 30], clients=9, samples=200)
>>> bool((ctx.uniform("u", 5)[1] == ctx.at(slice(1, 2)).uniform("u", 5)[0]).all())
True
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import SparingError
from sparing.core.keys import choose, client_keys, hashes, tag_word, uniforms
from sparing.core.ops import place

Made = TypeVar("Made")
EVERYONE = -1
"""The id under which draws common to all clients are keyed."""


class Federation(NamedTuple):
    """What never changes in a run."""

    seed: int
    rounds: int  # planned in all
    clients: int  # in all
    samples: int  # of the clients that train
    held: int = 0  # of all clients: those that never train


class Members(NamedTuple):
    """K clients, and what the server knows of them before they say anything; all on the host."""

    ids: Tensor  # [K]
    n: Tensor  # [K] samples
    first: Tensor | None = None  # [K] true where the server never met the client before
    capacity: dict[str, Tensor] | None = None  # what devices declared, such as rank or bandwidth, each [K]
    budget: Tensor | None = None  # [K] most bytes each may upload, where a round has a deadline

    def at(self, index: Tensor | slice) -> "Members":
        """Some of them."""
        capacity = {name: x[index] for name, x in self.capacity.items()} if self.capacity else None
        first, budget = (None if x is None else x[index] for x in (self.first, self.budget))
        return Members(self.ids[index], self.n[index], first, capacity, budget)


class Requirement(NamedTuple):
    """What must hold, and what is said if it does not: an error to raise, the words of a warning, or nothing where a
    closer look finds it true."""

    holds: Tensor  # bool, all of it must be true
    otherwise: Callable[[], SparingError | str | None]


class Workspace(NamedTuple):
    """Where a round is computed, lent by whoever plays it."""

    device: torch.device
    requirements: list[Requirement] | None  # collected here and judged later; None: judged at once
    memo: dict[Hashable, object]  # draws that a round needs several times


class Ctx(NamedTuple):
    """One round, as seen for K of its clients."""

    federation: Federation
    round: int
    cohort: int  # clients taking part in this round
    members: Members
    workspace: Workspace

    @property
    def seed(self) -> int:
        return self.federation.seed

    @property
    def rounds(self) -> int:
        return self.federation.rounds

    @property
    def clients(self) -> int:
        return self.federation.clients

    @property
    def samples(self) -> int:
        return self.federation.samples

    @property
    def held(self) -> int:
        return self.federation.held

    @property
    def ids(self) -> Tensor:
        return self.members.ids

    @property
    def n(self) -> Tensor:
        return self.members.n

    @property
    def first(self) -> Tensor | None:
        return self.members.first

    @property
    def capacity(self) -> dict[str, Tensor] | None:
        return self.members.capacity

    @property
    def budget(self) -> Tensor | None:
        return self.members.budget

    @property
    def device(self) -> torch.device:
        return self.workspace.device

    def placed(self, x: Tensor) -> Tensor:
        """A tensor of the host, such as ids, where this round is computed."""
        return place(x, self.device)

    def at(self, index: Tensor | slice) -> "Ctx":
        """The same round seen by some of these clients."""
        return self._replace(members=self.members.at(index.cpu() if isinstance(index, Tensor) else index))

    @property
    def common(self) -> "Ctx":
        """One row that every client and the server agree on."""
        return self._replace(members=Members(torch.tensor([EVERYONE]), torch.tensor([self.samples])))

    def keys(self, tag: str) -> Tensor:
        """One 64-bit key per client: `[K]` int64."""
        return self.placed(torch.from_numpy(few_keys(self, tag)[0].view(np.int64)))

    def uniform(self, tag: str, n: int) -> Tensor:
        """`[K, n]` float32 in [0, 1)."""
        return uniforms(hashes(self.keys(tag), n))

    def choose(self, tag: str, d: int, k: int) -> Tensor:
        """`[K, d]` bool with exactly k true in every row, every set of k positions equally likely."""
        return choose(self.keys(tag), d, k)

    def once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives, made once a round: it must follow from the round and the name alone."""
        key = (self.round, name)
        if key not in self.workspace.memo:
            self.workspace.memo[key] = make()
        return self.workspace.memo[key]  # type: ignore[return-value]

    def require(self, holds: Tensor, otherwise: Callable[[], SparingError | str | None]) -> None:
        """This must hold before the round counts. An error stops the run, words are a warning."""
        requirement = Requirement(holds, otherwise)
        if self.workspace.requirements is None:
            judge(requirement, bool(holds.all()))
        else:
            self.workspace.requirements.append(requirement)


def few_keys(ctx: Ctx, *tags: str) -> np.ndarray:
    """The keys of several tags, `[tags, K]` uint64."""
    return client_keys(ctx.ids.numpy(), *(tag_word(ctx.seed, ctx.round, tag) for tag in tags))


def judge(requirement: Requirement, holds: bool) -> None:
    """The one place where a requirement that does not hold has consequences."""
    if holds:
        return
    said = requirement.otherwise()
    if isinstance(said, SparingError):
        raise said
    if said is not None:
        warnings.warn(said, stacklevel=2)


def context(
    seed: int, round: int, rounds: int, ids: Sequence[int] | Tensor, n: Sequence[int] | Tensor, clients: int,
    samples: int, cohort: int = 1, first: Tensor | None = None, capacity: dict[str, Tensor] | None = None,
    held: int = 0, budget: Tensor | None = None, device: torch.device | str = "cpu",
    requirements: list[Requirement] | None = None,
) -> Ctx:  # fmt: skip
    """A round, from what is known of it."""
    members = Members(torch.as_tensor(ids).cpu(), torch.as_tensor(n).cpu(), first, capacity, budget)
    workspace = Workspace(torch.device(device), requirements, {})
    return Ctx(Federation(seed, rounds, clients, samples, held), round, cohort, members, workspace)
