"""What a tree computes: models, ledgers, parcels and refusals of many small runs, to compare with another tree's.

A refactoring must not change them. Only the public interface is used, so this file runs on any tree: the one that
PYTHONPATH names. Takes some minutes on one core.

    python benchmarks/golden.py --out A.json [--loop loop] [--only WORD]     record (--loop: the CPU loop's plan.path)
    python benchmarks/golden.py --compare A.json B.json                      what differs; exit 1 if more than metrics

Metrics are what rounds.csv, clients.csv and metrics.csv say: their differences are shown, but may be a last bit.
"""

import argparse
import csv
import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIELDS = ("error", "model_sha256", "up_bytes", "down_bytes", "ledger", "parcels", "epsilon", "stopped")


def record(loop: str, only: str) -> dict[str, Any]:
    import torch
    from golden_cases import cases
    from refused import combinations, refusals

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [case for case in cases() if only in case.name]
    out: dict[str, Any] = {"torch": torch.__version__, "loop": loop, "only": only, "cases": {}}
    for i, case in enumerate(chosen, 1):
        began = time.perf_counter()
        if case.name in out["cases"]:
            raise SystemExit(f"two cases are called {case.name!r}; rename one")
        out["cases"][case.name] = played(case, loop)
        progress(f"case {i} of {len(chosen)}, {time.perf_counter() - began:.1f} s: {case.name}")
    wanted = [names for names in combinations() if only in "+".join(names)]
    out["refusals"] = dict(refusals(wanted, loop, progress))
    progress("")
    return out


def progress(text: str) -> None:
    if sys.stderr.isatty() or not text:
        sys.stderr.write(f"\r\033[K{text[:110]}" if sys.stderr.isatty() else "")
        sys.stderr.flush()


class Stop(Exception):
    """Breaks a run off as a crash would."""


def played(case: Any, loop: str) -> dict[str, Any]:
    from golden_cases import FILES, LOOP, SECRET

    import sparing

    plan = case.study["plan"]
    study = {**case.study, "plan": {**plan, "path": loop if plan["path"] == LOOP else plan["path"]}}

    def stop(done: Any) -> None:
        if done.round == case.stop:
            raise Stop

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        try:
            result = sparing.run(case.task, case.method, out=folder, loggers=[stop], secret=SECRET, **study)
        except Stop:
            result = sparing.resume(folder, case.task if isinstance(case.task, sparing.Task) else None)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".replace(place, "").replace(FILES.name, "")}
        return {
            "model_sha256": result.model_sha256,
            "up_bytes": result.up_bytes,
            "down_bytes": result.down_bytes,
            "ledger": digest([folder / "ledger.csv"]),
            "parcels": digest(sorted(p for p in (folder / "parcels").rglob("*") if p.is_file())),
            "epsilon": repr(result.epsilon),
            "stopped": result.stopped,
            "metrics": measured(folder),
        }


def digest(paths: list[Path]) -> str:
    """Of the names and contents of these files; empty where there are none."""
    known = hashlib.sha256()
    for path in paths:
        known.update(path.name.encode() + b"\0" + path.read_bytes())
    return known.hexdigest() if paths else ""


def measured(folder: Path) -> dict[str, str]:
    """Every number that the run reported, but for those that depend on the clock on the wall."""
    out = {}
    for row in csv.DictReader((folder / "rounds.csv").read_text().splitlines()):
        t = row.pop("round")
        out |= {f"{t}/{name}": value for name, value in row.items() if "seconds" not in name}
    for row in csv.DictReader((folder / "metrics.csv").read_text().splitlines()):
        out[f"{row['round']}/{row['metric']}"] = row["value"]
    return out | {"clients.csv": digest([folder / "clients.csv"])}


def compare(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Print what differs; the number of differences that are more than metrics."""
    found = list(differences(a["cases"], b["cases"]))
    for name, field, one, other in found:
        print(f"{name}: {field}\n    {one}\n    {other}")
    moved = list(metric_differences(a["cases"], b["cases"]))
    for name, what, one, other in moved:
        print(f"{name}: metric {what}: {one} became {other}{apart(one, other)}")
    judged = refusals_apart(a["refusals"], b["refusals"])
    if found or moved or judged:
        print(f"{len(found)} fields, {judged} refusals and {len(moved)} metrics differ")
    return len(found) + judged


def differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    for name in {**a, **b}:
        if name not in a or name not in b:
            yield name, "recorded", name in a, name in b
            continue
        for field in FIELDS:
            one, other = a[name].get(field), b[name].get(field)
            if one != other:
                yield name, field, one, other


def metric_differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for name in (name for name in a if name in b):
        ours, theirs = a[name].get("metrics", {}), b[name].get("metrics", {})
        if "error" in a[name] or "error" in b[name]:
            continue
        for what in {**ours, **theirs}:
            if ours.get(what) != theirs.get(what):
                yield name, what, ours.get(what, "nothing"), theirs.get(what, "nothing")


def apart(one: str, other: str) -> str:
    """How far two numbers are apart, relative to the larger one."""
    try:
        x, y = float(one), float(other)
    except ValueError:
        return ""
    return f" ({abs(x - y) / max(abs(x), abs(y)):.1e})" if max(abs(x), abs(y)) else ""


def refusals_apart(a: dict[str, str], b: dict[str, str]) -> int:
    """Who is refused in one tree only, and the sentences that changed, each once with how often."""
    count, sentences = 0, Counter()
    for names in {**a, **b}:
        one, other = a.get(names, "not recorded"), b.get(names, "not recorded")
        if one == other:
            continue
        count += 1
        if one and other and "not recorded" not in (one, other):
            sentences[one, other] += 1
        else:
            print(f"{names}: {one or 'allowed'}\n    became: {other or 'allowed'}")
    for (one, other), times in sentences.most_common():
        print(f"{times} refusals in other words: {one}\n    became: {other}")
    return count


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, help="file to record into")
    options.add_argument("--loop", default="loop", help="plan.path of the CPU loop (default: loop)")
    options.add_argument("--only", default="", metavar="WORD", help="cases and refusals with this word in their name")
    options.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two files that were recorded")
    args = options.parse_args()
    if args.compare:
        raise SystemExit(compare(*(json.loads(path.read_text()) for path in args.compare)) > 0)
    if args.out is None:
        options.error("name a file to record into (--out FILE.json), or two to compare (--compare A.json B.json)")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    out = record(args.loop, args.only)
    args.out.write_text(json.dumps(out, indent=0) + "\n")
    wrong = sum("error" in case for case in out["cases"].values())
    refused = sum(bool(sentence) for sentence in out["refusals"].values())
    print(
        f"{len(out['cases'])} cases, {wrong} of them refused; {refused} of {len(out['refusals'])} combinations refused"
    )
    print(f"{time.perf_counter() - began:.0f} s, of which {time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
