"""What the virtual clock says of a round; it ends up in metrics.csv.

clock                             seconds since the start of the run
clock_p50, clock_p90, clock_max   seconds of the clients that arrived: median, nine tenths, slowest
late                              clients that missed the deadline
"""

import torch

from sparing.core.context import context
from sparing.engines.engine import Job, Outcome, total_bytes
from sparing.fleet.fleet import Fleet
from sparing.fleet.timing import UNITS_PER_SECOND, seconds_for, seconds_until_upload


def is_timed(fleet: Fleet) -> bool:
    """Whether anything in a round takes time."""
    return fleet.latency > 0 or any(name in fleet.capacity for name in UNITS_PER_SECOND)


def clock_report(job: Job, outcome: Outcome, t: int, so_far: float) -> dict[str, float]:
    """A round takes as long as the slowest client that arrived, or up to the deadline if somebody did not."""
    fleet, ids, arrived = job.fleet, outcome.ids, outcome.arrived
    report = {"clock": so_far}
    if not len(ids):
        return report
    capacity = {name: x[ids] for name, x in fleet.capacity.items()}
    began = seconds_until_upload(fleet.latency, job.method.local, capacity, outcome.n, total_bytes(outcome.down))
    seconds = (began + seconds_for("up", capacity, total_bytes(outcome.up)))[arrived]
    if len(seconds):
        shares = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
        median, most, slowest = torch.quantile(seconds, shares).tolist()
        report |= {"clock_p50": median, "clock_p90": most, "clock_max": slowest}
    spent = report.get("clock_max", 0.0)
    if fleet.deadline is not None:
        vanished = fleet.vanished(context(job.seed, t, job.rounds, ids, outcome.n, len(job.task), 0))
        report["late"] = float((~arrived & ~vanished).sum())
        spent = min(spent, fleet.deadline) if bool(arrived.all()) else fleet.deadline
    return report | {"clock": so_far + spent}
