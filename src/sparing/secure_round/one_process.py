"""All parties of a sum in one process: what simulations run to be sure that the plan of a sum is its truth."""

import hashlib
from collections import Counter

import numpy as np

from sparing.core.errors import SparingError
from sparing.secure.long_term import KeyRoster, NodeKeys, new_node_keys
from sparing.secure.node_rules import Bound, NodePolicy
from sparing.secure.sum_client import ClientSum, answer_unmask, mask_upload, prepare_sum
from sparing.secure.sum_server import MaskedSum, read_prepared
from sparing.secure.sum_terms import RUN_BYTES
from sparing.secure_round.planned_sum import PlannedSum


class SimulatedNodes:
    """The keys of everybody, and what each is bound to.

    The run is named by its seed, so that its sparse graphs, and with them who may drop out, are the same every time.
    """

    def __init__(self, policy: NodePolicy, seed: int):
        self.run, self.policy = hashlib.sha256(f"sparing/simulated/{seed}".encode()).digest()[:RUN_BYTES], policy
        self.keys: dict[int, NodeKeys] = {}
        self.bounds: dict[int, Bound] = {}

    def roster(self, cohort: tuple[int, ...]) -> KeyRoster:
        for who in cohort:
            if who not in self.keys:
                self.keys[who], self.bounds[who] = new_node_keys(), Bound(self.run)
        return KeyRoster({who: self.keys[who].public() for who in cohort})


class OneProcessSum:
    """One attempt, which goes as planned."""

    def __init__(self, planned: PlannedSum, nodes: SimulatedNodes):
        self.planned, self.nodes, self.terms = planned, nodes, planned.terms
        self.roster = nodes.roster(self.terms.cohort)
        self.states: dict[int, ClientSum] = {}
        self.up: Counter[int] = Counter()  # bytes from each client
        self.down: Counter[int] = Counter()  # and to it, but for the notice
        prepared = {}
        for who in sorted(planned.here):
            state, nodes.bounds[who] = prepare_sum(
                self.terms, who, nodes.keys[who], self.roster, nodes.policy, nodes.bounds[who]
            )
            self.states[who], self.up[who] = state, len(state.prepare)
            prepared[who] = read_prepared(self.terms, self.roster, who, state.prepare)
        self.server = None if planned.fails else MaskedSum(self.terms, prepared)
        self.introductions = {who: self.server.introduction(who) for who in planned.introduced} if self.server else {}
        self.down += Counter({who: len(message) for who, message in self.introductions.items()})

    def upload(self, client: int, vector: np.ndarray) -> None:
        if self.server is None or client not in self.planned.survivors:
            return
        self.states[client], upload = mask_upload(self.states[client], self.roster, self.introductions[client], vector)
        self.server.add(client, upload)
        self.up[client] += len(upload)

    def unmasked(self) -> np.ndarray:
        """The sum over the survivors; every message must have had the length that was planned."""
        server = self.server
        assert server is not None
        for who in sorted(self.planned.survivors):
            request = server.request(who)
            answer, self.nodes.bounds[who] = answer_unmask(
                self.states[who], self.nodes.keys[who], self.roster, self.nodes.policy, request, self.nodes.bounds[who]
            )
            server.hear(who, answer)
            self.down[who] += len(request)
            self.up[who] += len(answer)
        self._compare_lengths()
        return server.unmasked()

    def _compare_lengths(self) -> None:
        ids = sorted(self.planned.here)
        for way, sizes, seen, extra in (
            ("sent", self.planned.up(ids), self.up, 0),
            ("got", self.planned.down(ids), self.down, self.planned.notice_length),
        ):
            counted = sum(sizes.values())
            for who, length in zip(ids, counted.tolist(), strict=True):  # type: ignore[union-attr]
                if length != seen[who] + extra:
                    raise SparingError(
                        f"counted {length} bytes that client {who} {way} for a secure sum, where they are "
                        f"{seen[who] + extra}; this is a bug, please report it"
                    )
