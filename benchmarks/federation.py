"""A federation on this machine, over Flower, beside the simulation of the same study: `make federation`.

A SuperLink with TLS and node keys, a SuperNode and a `sparing join` for each client, `sparing serve`, and the Flower
app between them. Prints both models' hashes, whether the ledgers are equal, and what it cost.

python benchmarks/federation.py [STUDY.yaml key=value ...] [--kill-server 5] [--kill-nodes 10] [--absent 0.3]
"""

import argparse
import csv
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from federation_processes import Federation

import sparing
from sparing.net.holdings import write_holdings
from sparing.runs.own_code import trust_code
from sparing.runs.start import start_run, task_from_study
from sparing.runs.study import Study, load_study

ROOT = Path(__file__).parents[1]
SPARING = [sys.executable, "-m", "sparing"]


class Trial:
    """One study over Flower."""

    def __init__(self, folder: Path, flower: Path, study: Path, overrides: list[str], study_values: Study):
        self.folder, self.study, self.overrides, self.values = folder, study, overrides, study_values
        task = task_from_study(study_values)
        self.clients, self.run = len(task), folder / "run"
        write_holdings(folder / "data", task, int(max(task.train.y.max(), task.test_all[1].max())) + 1)
        self.federation = Federation(folder / "flower", flower, self.serve, self.join)

    def serve(self, federation: Federation) -> list[str]:
        options = ["--test", self.data("server"), "--socket", str(federation.server_socket), "--json", "--trust"]
        if (self.run / "config.yaml").exists():
            return [*SPARING, "serve", "--resume", str(self.run), *options]
        roster = self.folder / "roster.csv"
        with open(roster, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerows([("client", "key"), *((k, federation.node_ids[k]) for k in range(self.clients))])
        study = [str(self.study), *self.overrides]
        return [*SPARING, "serve", *study, "--roster", str(roster), "--out", str(self.run), *options]

    def join(self, federation: Federation, number: int) -> list[str]:
        state = ["--state", str(self.folder / f"state{number}"), "--socket", str(federation.node_socket(number))]
        return [*SPARING, "join", "--data", self.data(f"client-{number}"), *state, *self.own_code()]

    def own_code(self) -> list[str]:
        """Nodes name their own copies of what the study names."""
        named = {key.rpartition(".")[2]: call.reference for key, call in self.values.code().items()}
        return [word for key in ("model", "loss") if key in named for word in (f"--{key}", named[key])]

    def data(self, name: str) -> str:
        return str(self.folder / "data" / f"{name}.npz")

    @property
    def rounds_done(self) -> int:
        table = self.run / "rounds.csv"
        return max(0, len(table.read_text().splitlines()) - 1) if table.exists() else 0

    def wait(self, mishaps: "Mishaps", patience: float) -> None:
        """To the end of the run, with whatever is to happen on the way."""
        server, limit = self.federation.processes["server"], time.monotonic() + patience
        while server.poll() is None:
            mishaps.happen(self)
            server = self.federation.processes["server"]
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"round {self.rounds_done} after {patience:.0f} s: {self.federation.last_line('server')}"
                )
            time.sleep(0.2)
        if server.returncode:
            raise RuntimeError(self.federation.log("server").read_text()[-2000:])


class Mishaps:
    """SIGKILLs, spread over the run by a seed."""

    def __init__(self, servers: int, nodes: int, absent: float, rounds: int, clients: int, seed: int = 0):
        dice = random.Random(seed)
        self.clients, self.absent, self.dice = clients, absent, dice
        self.plan = [(dice.uniform(0, rounds - 0.5), "server") for _ in range(servers)]
        self.plan += [(dice.uniform(0, rounds - 0.5), "node") for _ in range(nodes)]
        self.plan.sort()
        self.done = {"server": 0, "node": 0}
        self.last_round = 0

    def happen(self, trial: Trial) -> None:
        federation, now = trial.federation, trial.rounds_done
        if self.absent and now >= self.last_round:
            self.last_round = now + 1
            for who in self.dice.sample(range(self.clients), max(1, round(self.absent * self.clients))):
                self.kill_node(federation, who)
        while self.plan and self.plan[0][0] <= now:
            what = self.plan.pop(0)[1]
            time.sleep(self.dice.uniform(0, 3))
            if what == "node":
                self.kill_node(federation, self.dice.randrange(self.clients))
            elif federation.processes["server"].poll() is None:
                federation.kill("server")
                self.done["server"] += 1
                federation.start_server()

    def kill_node(self, federation: Federation, number: int) -> None:
        federation.kill(f"node{number}")
        self.done["node"] += 1
        federation.start_node(number)


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("study", nargs="*", help="a study file, and key=value overrides of it")
    options.add_argument("--flower", type=Path, default=ROOT / ".venv-flower" / "bin")
    options.add_argument("--kill-server", type=int, default=0)
    options.add_argument("--kill-nodes", type=int, default=0)
    options.add_argument("--absent", type=float, default=0.0, help="share of the nodes killed in every round")
    options.add_argument("--patience", type=float, default=3000.0)
    options.add_argument("--json", type=Path, help="also write the figures here")
    args = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    files = [word for word in args.study if "=" not in word]
    study, overrides = (
        Path(files[0]) if files else ROOT / "configs" / "federation.yaml",
        [word for word in args.study if "=" in word],
    )
    values = load_study(study, overrides)
    trust_code(values)
    with tempfile.TemporaryDirectory(prefix="fed-", ignore_cleanup_errors=True) as folder:
        return play(Path(folder), args, study, overrides, values)


def play(folder: Path, args: argparse.Namespace, study: Path, overrides: list[str], values: Study) -> int:
    trial = Trial(folder, args.flower, study, overrides, values)
    mishaps = Mishaps(args.kill_server, args.kill_nodes, args.absent, values.rounds, trial.clients)
    with trial.federation as federation:
        print(f"{trial.clients} clients over Flower, {values.rounds} rounds", flush=True)
        federation.begin(trial.clients)
        began, spent = time.monotonic(), federation.cpu_seconds()
        trial.wait(mishaps, args.patience)
        seconds, spent = time.monotonic() - began, federation.cpu_seconds() - spent
    result = json.loads((trial.run / "summary.json").read_text())
    again = simulate(trial, folder / "simulated", arrived=bool(args.absent or values.network.over))
    same = result["model_sha256"] == again.model_sha256
    ledger = (trial.run / "ledger.csv").read_bytes() == (folder / "simulated" / "ledger.csv").read_bytes()
    messages = result["rounds"] * trial.clients
    print(f"over Flower   {result['model_sha256']}")
    verdict = f"{'the same' if same else 'ANOTHER'}; ledger {'equal' if ledger else 'DIFFERENT'}"
    print(f"simulated     {again.model_sha256}  {verdict}")
    if values.secure:
        plain = simulate(trial, folder / "plain", bool(args.absent or values.network.over), masked=False)
        alike = plain.model_sha256 == result["model_sha256"]
        print(f"without masks {plain.model_sha256}  {'the same' if alike else 'ANOTHER'}")
        same &= alike
    print(f"killed: server {mishaps.done['server']} times, nodes {mishaps.done['node']} times")
    figures = {
        "rounds": result["rounds"],
        "clients": trial.clients,
        "seconds_per_round": round(seconds / result["rounds"], 2),
        "cpu_seconds_per_message": round(spent / messages, 2),
        "ledger_up_bytes": result["up_bytes"],
        "ledger_down_bytes": result["down_bytes"],
        "accuracy": result["accuracy"],
        "same_model": same,
        "same_ledger": ledger,
        **mishaps.done,
    }
    print(json.dumps(figures))
    if args.json:
        args.json.write_text(json.dumps(figures) + "\n")
    return 0 if same and ledger else 1


def simulate(trial: Trial, out: Path, arrived: bool, masked: bool = True) -> sparing.Result:
    """The same study in one process; where somebody was left out, with the arrivals that were recorded.

    `masked`: with secure aggregation, if the study has it.
    """
    overrides = [*trial.overrides, *([f"fleet.arrived={trial.run}"] if arrived else [])]
    study = load_study(trial.study, overrides)
    return start_run(study if masked else study.model_copy(update={"secure": None}), out=out)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
