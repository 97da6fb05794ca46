"""Runs what is missing of a question's rows; every finished run is a line of results/QUESTION.jsonl.

Stopped at any moment, it goes on where it was. Only runs that are expected to end within the minutes given are begun.

    python benchmarks/evidence/settle.py QUESTION ... [--minutes 9] [--jobs 2] [--device cpu]
    python benchmarks/evidence/settle.py QUESTION --rows "FedAvg" --settings writers --seeds 100 101
    python benchmarks/evidence/settle.py --plan
"""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from plan import expected_seconds, write_plan
from play import play
from question import Job, Question, mark
from questions import QUESTIONS

from runs import add_result, read_results, wanted_jobs


def settle(name: str, args: argparse.Namespace, pool: ProcessPoolExecutor, ends: float) -> None:
    """One question, `jobs` runs at a time."""
    question, running = QUESTIONS[name], dict[Future[Job], Job]()
    begun: set[tuple[Any, ...]] = set()
    while True:
        done = read_results(name)
        for job in wanted_jobs(with_seeds(question, args.seeds), done):
            if len(running) >= args.jobs:
                break
            if mark(job) in begun or not asked_for(job, args):
                continue
            setting, row = question.settings[job["setting"]], question.rows[job["row"]]
            if time.monotonic() + expected_seconds(question, job, done, args.device) > ends:
                continue
            begun.add(mark(job))
            running[pool.submit(play, setting, row, job, args.device)] = job
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            running.pop(future)
            result = future.result()
            add_result(result)
            print(line_of(result), flush=True)


def with_seeds(question: Question, seeds: list[int] | None) -> Question:
    return question._replace(seeds=seeds, seeds_of={}) if seeds else question


def asked_for(job: Job, args: argparse.Namespace) -> bool:
    return (not args.rows or job["row"] in args.rows) and (not args.settings or job["setting"] in args.settings)


def line_of(job: Job) -> str:
    came = job.get("failed") or job["curve"][-1][1:5]
    words = (job["question"], job["setting"], job["row"], job["stage"], f"rate {job['rate']:g}", f"seed {job['seed']}")
    return f"{', '.join(words)}: {came}, {job['seconds']:.0f} s"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    options.add_argument("--minutes", type=float, default=float("inf"))
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--device", default="cpu")
    options.add_argument("--rows", nargs="+")
    options.add_argument("--settings", nargs="+")
    options.add_argument("--seeds", nargs="+", type=int, help="other seeds, to run rows again")
    options.add_argument("--plan", action="store_true", help="write the tables of plan.md anew, and run nothing")
    args = options.parse_args()
    if args.plan:
        write_plan()
        return
    if unknown := set(args.questions) - set(QUESTIONS):
        options.error(f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    ends = time.monotonic() + 60 * args.minutes
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for name in args.questions:
            settle(name, args, pool, ends)


if __name__ == "__main__":
    main()
