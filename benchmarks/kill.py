"""kill -9 at random moments of five methods, then resume: the same model and tables as the unbroken run, or not.

Every chain is killed at least once while it begins or trains and up to twice while it resumes. A third of the kills
wait for a checkpoint that is being written, the first one among them; the others come at any moment of a run.

python benchmarks/kill.py [--times 100] [--banks memory file] [--seed 0]
"""

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from forked import METHODS, begun, done, ended, go_on, outcome, progress, study_of, warm

from sparing.runs.start import start_run
from sparing.runs.study import Study

PART = ".checkpoint.safetensors.part"


def killed(folder: Path, study: Study, draw: random.Random, took: float) -> str:
    """Begin or resume, and kill the process; how far it had come."""
    child = begun(lambda: go_on(folder, study))
    aim, limit = draw.random() < 1 / 3, time.perf_counter() + draw.uniform(0, 1.1 * took)
    while time.perf_counter() < limit and not (aim and (folder / PART).exists()):
        if os.waitid(os.P_PID, child[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.0005)
    os.kill(child[0], signal.SIGKILL)
    within = " within a checkpoint" if (folder / PART).exists() else ""
    code, said = ended(child)
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"{folder} was refused on the way: {said}")
    if not (folder / "config.yaml").exists():
        return "before it had begun" + within
    return f"after {len((folder / 'rounds.csv').read_text().splitlines()) - 1} rounds" + within


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--times", type=int, default=100)
    options.add_argument("--banks", nargs="+", default=["memory", "file"])
    options.add_argument("--methods", nargs="+", default=list(METHODS))
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    warm()
    draw = random.Random(args.seed)
    cases = [(method, bank) for method in args.methods for bank in args.banks]
    good, kills, at = 0, 0, {"first checkpoint": 0, "a checkpoint": 0, "resume": 0}
    with tempfile.TemporaryDirectory() as place:
        whole = {}
        for method, bank in cases:
            folder, began = Path(place) / f"{method}-{bank}", time.perf_counter()
            code, said = done(lambda m=method, b=bank, f=folder: start_run(study_of(METHODS[m], b), out=f))
            if code:
                raise SystemExit(said)
            whole[method, bank] = outcome(folder), time.perf_counter() - began
        for i in range(args.times):
            method, bank = cases[i % len(cases)]
            want, took = whole[method, bank]
            folder, study = Path(place) / f"killed{i}", study_of(METHODS[method], bank)
            story = []
            for again in range(draw.randint(1, 3)):
                at["resume"] += again > 0
                story.append(killed(folder, study, draw, took))
                kills += 1
                at["first checkpoint"] += story[-1] == "before it had begun within a checkpoint"
                at["a checkpoint"] += story[-1].endswith("within a checkpoint")
            code, said = done(lambda f=folder, s=study: go_on(f, s))
            same = code == 0 and outcome(folder) == want
            good += same
            progress(f"{i + 1} of {args.times}")
            if not same:
                print(f"  {method}, bank {bank}, killed {', then '.join(story)}: {said or 'DIFFERENT'}")
    print(f"{kills} kills in {args.times} chains of {len(cases)} cases: {at['first checkpoint']} within the first")
    print(f"checkpoint, {at['a checkpoint']} within one at all, {at['resume']} within resume")
    print(f"{good} of {args.times} the same")
    raise SystemExit(good != args.times)


if __name__ == "__main__":
    main()
