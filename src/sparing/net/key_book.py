"""The public keys of a federation's clients, as the server passes them on. Whose they are, every node checks itself."""

from sparing.core.errors import ConfigError, WireError
from sparing.secure.long_term import KeyRoster, PublicKeys, read_key_roster
from sparing.secure.primitives import KEY_BYTES


class PublicKeyBook:
    """Grows as clients join; `roster` is what they are all sent."""

    def __init__(self) -> None:
        self.known: dict[int, PublicKeys] = {}
        self.confirmed: set[int] = set()  # clients that hold everybody's keys

    def add(self, client: int, body: bytes) -> None:
        """What a client says are its keys when it joins; they never change in a run."""
        if len(body) != 2 * KEY_BYTES:
            raise WireError(f"client {client} sends {len(body)} bytes as its public keys, not {2 * KEY_BYTES}")
        keys = PublicKeys(body[:KEY_BYTES], body[KEY_BYTES:])
        if client not in self.known:
            self._check(client, keys)
            self.known[client] = keys
        if self.known[client] != keys:
            raise ConfigError(
                f"client {client} has other keys than those that everybody holds; restore its state folder, or start a "
                "new run"
            )

    def _check(self, client: int, keys: PublicKeys) -> None:
        """What a roster would refuse, refused when it is said: one client must not spoil everybody's."""
        KeyRoster({client: keys})
        for who, other in self.known.items():
            if keys.signing == other.signing or keys.sharing == other.sharing:
                KeyRoster({who: other, client: keys})

    def use(self, roster: KeyRoster, clients: int) -> None:
        """Go by a roster that the operator has handed out."""
        missing = next((who for who in range(clients) if who not in roster), None)
        if missing is not None:
            raise ConfigError(f"the key roster has no keys of client {missing}; add its line, from `sparing keys`")
        self.known = {who: roster[who] for who in range(clients)}

    @property
    def roster(self) -> KeyRoster:
        return KeyRoster(self.known)

    def text(self) -> str:
        return self.roster.text()

    def restore(self, text: str) -> None:
        """Go on with the keys of a run that had begun."""
        roster = read_key_roster(text)
        self.known = {who: roster[who] for who in roster}
