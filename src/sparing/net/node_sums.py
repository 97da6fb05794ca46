"""The secure sums that one client of a node takes part in: its keys, everybody else's, and what it is bound to.

All of it lies beside the client's state, readable by its owner alone, and is on disk before a message leaves that
depends on it. A copy from earlier must never be put back in the middle of a run: a node would forget what it has bound
itself to.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparing.core.errors import CheckpointError, ConfigError, SecureError
from sparing.secure.long_term import KeyRoster, NodeKeys, new_node_keys, read_key_roster
from sparing.secure.node_rules import Bound, NodePolicy
from sparing.secure.sum_client import ClientSum, answer_unmask, mask_upload, prepare_sum
from sparing.secure.sum_terms import SumTerms, read_sum_terms, write_sum_terms
from sparing.secure_round.settings import SecureSettings
from sparing.storage.atomic import os_errors_as_checkpoint_error, owner_only, write_json


class SumRules(NamedTuple):
    """What the operator of a node wants of secure sums, whatever the server says."""

    insists: bool = False  # on studies in which uploads are summed under masks
    policy: NodePolicy = NodePolicy()
    handed_out: KeyRoster | None = None  # everybody's keys; None: as they are told at joining


class NodeSums:
    """Of one client, in a study with these settings."""

    def __init__(self, folder: Path, client: int, settings: SecureSettings, rules: SumRules = SumRules()):
        self.folder, self.client, self.handed_out = folder, client, rules.handed_out
        own, said, handed_out = rules.policy, settings.policy, rules.handed_out
        self.policy = NodePolicy(max(own.clients, said.clients), max(own.colluding, said.colluding), said.degree)
        self.keys = open_node_keys(folder, client)
        if handed_out is not None and handed_out[client] != self.keys.public():
            raise ConfigError(
                f"the key roster has other keys of client {client} than {self.folder}; ask its operator for a new one"
            )

    def path(self, kind: str) -> Path:
        return self.folder / f"client-{self.client}.{kind}.json"

    def pin(self, run: bytes, text: str) -> KeyRoster:
        """Everybody's keys, as the server tells them at joining: they stay the same for the run."""
        told = read_key_roster(text)
        self._refuse_other(told)
        held = self._read("roster")
        if held and held["run"] == run.hex() and held["keys"] != told.text():
            raise SecureError("the server's key roster has changed since this node joined; it takes no part")
        if told[self.client] != self.keys.public():
            raise SecureError(f"the server's key roster has other keys of client {self.client} than this node")
        self._write("roster", {"run": run.hex(), "keys": told.text()})
        return told

    def roster(self, run: bytes) -> KeyRoster | None:
        """Everybody's keys; None: it was not told yet."""
        held = self._read("roster")
        if not held or held["run"] != run.hex():
            return None
        roster = read_key_roster(held["keys"])
        self._refuse_other(roster)
        return roster

    def _refuse_other(self, told: KeyRoster) -> None:
        if self.handed_out is not None and told != self.handed_out:
            raise SecureError(
                f"the server's key roster {told.fingerprint} is not the one that was handed out, "
                f"{self.handed_out.fingerprint}; this node takes no part"
            )

    def is_bound(self, terms: SumTerms) -> bool:
        """Whether this client has helped to unmask another sum of the round."""
        state, bound = self._held(terms.run)
        return bound.round == terms.round and bool(bound.answered) and (state is None or state.terms != terms)

    def prepare(self, terms: SumTerms) -> bytes:
        state, bound = self._held(terms.run)
        if state is not None and state.terms == terms:
            return state.prepare
        state, bound = prepare_sum(terms, self.client, self.keys, self._known(terms.run), self.policy, bound)
        self._keep(state, bound)
        return state.prepare

    def upload(self, run: bytes, round: int, introduction: bytes, vector: np.ndarray) -> bytes:
        state, bound = self._state(run, round)
        state, upload = mask_upload(state, self._known(run), introduction, vector)
        self._keep(state, bound)
        return upload

    def unmask(self, run: bytes, round: int, request: bytes) -> bytes:
        state, bound = self._state(run, round)
        answer, bound = answer_unmask(state, self.keys, self._known(run), self.policy, request, bound)
        self._keep(state, bound)
        return answer

    def _known(self, run: bytes) -> KeyRoster:
        roster = self.roster(run)
        if roster is None:
            raise SecureError(f"client {self.client} was not told everybody's keys; send them first")
        return roster

    def _state(self, run: bytes, round: int) -> tuple[ClientSum, Bound]:
        state, bound = self._held(run)
        if state is None or state.terms.round != round:
            raise SecureError(f"client {self.client} has prepared no sum of round {round}; ask for a new attempt")
        return state, bound

    def _held(self, run: bytes) -> tuple[ClientSum | None, Bound]:
        held = self._read("sum")
        if held is None or held["bound"]["run"] != run.hex():
            return None, Bound(run)
        bound, state = held["bound"], held["state"]
        parts = {name: bytes.fromhex(state[name]) for name in ("private", "seed", "prepare", "introduction", "upload")}
        made = ClientSum(read_sum_terms(bytes.fromhex(state["terms"])), self.client, **parts)
        return made, Bound(run, bound["round"], bytes.fromhex(bound["cohort"]), bytes.fromhex(bound["answered"]))

    def _keep(self, state: ClientSum, bound: Bound) -> None:
        parts = ("private", "seed", "prepare", "introduction", "upload")
        kept = {"terms": write_sum_terms(state.terms).hex()} | {name: getattr(state, name).hex() for name in parts}
        to = {"run": bound.run.hex(), "round": bound.round, "cohort": bound.cohort.hex()}
        self._write("sum", {"bound": to | {"answered": bound.answered.hex()}, "state": kept})

    def _write(self, kind: str, value: dict[str, Any]) -> None:
        path = self.path(kind)
        with os_errors_as_checkpoint_error(path), owner_only():
            write_json(path, value)

    def _read(self, kind: str) -> dict[str, Any] | None:
        return _read_json(self.path(kind))


def read_keys_file(path: Path) -> KeyRoster:
    """Everybody's public keys, from a file that people hand to each other."""
    try:
        return read_key_roster(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}); give the file of everybody's keys"
        ) from None
    except SecureError as error:
        raise ConfigError(f"{path}: {error}") from None


def open_node_keys(folder: Path, client: int) -> NodeKeys:
    """The keys of a client, made when they are first asked for."""
    path = folder / f"client-{client}.keys.json"
    held = _read_json(path)
    if held is not None:
        return NodeKeys(bytes.fromhex(held["signing"]), bytes.fromhex(held["sharing"]))
    keys = new_node_keys()
    with os_errors_as_checkpoint_error(path), owner_only():
        write_json(path, {"signing": keys.signing.hex(), "sharing": keys.sharing.hex()})
    return keys


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); restore it, or start a new run"
        ) from None
