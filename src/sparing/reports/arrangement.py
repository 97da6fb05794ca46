"""Which runs are compared, up to which round, against which baseline, and in what order."""

from collections.abc import Sequence

from sparing.core.errors import ConfigError, nearest_name
from sparing.reports.ranking import Ranking
from sparing.reports.run_folders import RunGroup, StoredRun
from sparing.runs.results import Record, latest_value

_PLAIN_METHOD = "fedavg"


def groups_by_task(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """Only within a task are methods ranked, and compared at one round."""
    found: dict[str, list[RunGroup]] = {}
    for group in groups:
        found.setdefault(group.task, []).append(group)
    return found


def arrange_groups(
    groups: Sequence[RunGroup], baseline: str | None = None, incomplete: bool = False
) -> tuple[list[RunGroup], list[str]]:
    """Of each task its baseline first, then the others, the best first; all of them cut to one round."""
    groups, notes = complete_groups(groups, incomplete)
    if baseline is not None and not any(_is_called(group, baseline) for group in groups):
        labels = [group.label for group in groups]
        raise ConfigError(f"--baseline {baseline!r} is none of these; {nearest_name(baseline, labels)}")
    tasks, out = groups_by_task(groups), []
    for task, some in tasks.items():
        base, said = _choose_baseline(some, baseline, task if len(tasks) > 1 else "")
        ranking = ranking_of_task([base])
        others = [group for group in some if group is not base]
        out += [base, *sorted(others, key=lambda group: _group_rank(group, ranking), reverse=True)]
        notes += said + _ranking_notes([base, *others], task if len(tasks) > 1 else "")
    return out, notes


def complete_groups(groups: Sequence[RunGroup], incomplete: bool = False) -> tuple[list[RunGroup], list[str]]:
    """Groups of finished runs, those of one task cut to the last round that all of them have and evaluated.

    Unfinished runs are left out; or, where asked, they count among the others.
    """
    kept, notes = [], []
    for group in groups:
        runs = [run for run in group.runs if run.table and (run.finished or incomplete)]
        for run in group.runs:
            if not run.finished:
                notes.append(_unfinished_note(group, run, run in runs))
        if runs:
            kept.append(group._replace(runs=runs))
    if not kept:
        raise ConfigError(
            f"none of these runs is finished, so there is nothing to compare: {notes[0]}; `sparing resume` goes on "
            "with a run, and --allow-incomplete compares what there is"
        )
    out = {}
    for task, some in groups_by_task(kept).items():
        cut, said = _cut_to_common_round(some, task if len(groups_by_task(kept)) > 1 else "")
        out |= {group.label: group for group in cut}
        notes += said
    return [out[group.label] for group in kept], notes


def _unfinished_note(group: RunGroup, run: StoredRun, used: bool) -> str:
    wanted = run.settings.get("rounds")
    far = f"{run.folder} ({group.label}) is not finished: {len(run.table)} of {wanted} rounds"
    return f"{far} are there and are used" if used else f"{far}, so it is left out"


def _cut_to_common_round(groups: list[RunGroup], task: str) -> tuple[list[RunGroup], list[str]]:
    runs = [run for group in groups for run in group.runs]
    lengths = [len(run.table) for run in runs]
    ends = [max(_evaluated_rounds(run.table), default=0) for run in runs]
    if len(set(lengths)) == len(set(ends)) == 1:
        return groups, []
    shortest = min(lengths)
    shared = set.intersection(*(_evaluated_rounds(run.table) for run in runs))
    common = max((t for t in shared if t <= shortest), default=shortest)
    said = "; ".join(
        f"{group.method or group.label}: {_either({len(run.table) for run in group.runs})}" for group in groups
    )
    where = f" on {task}" if task else ""
    why = f"runs{where} have different numbers of rounds ({said})" if len(set(lengths)) > 1 else (
        f"runs{where} were evaluated in different rounds")  # fmt: skip
    cut = [group._replace(runs=[_cut_run(run, common) for run in group.runs]) for group in groups]
    return cut, [f"{why}: all of them are compared after round {common}, the last that every run has evaluated"]


def _evaluated_rounds(table: Sequence[Record]) -> set[int]:
    return {r.round for r in table if r.accuracy == r.accuracy or r.loss == r.loss}


def _cut_run(run: StoredRun, rounds: int) -> StoredRun:
    return run._replace(table=run.table[:rounds], value_bytes=run.value_bytes[:rounds])


def _either(counts: set[int]) -> str:
    return " or ".join(map(str, sorted(counts)))


def _is_called(group: RunGroup, wanted: str) -> bool:
    return wanted in (group.label, group.method, group.runs[0].name)


def _choose_baseline(groups: Sequence[RunGroup], wanted: str | None, task: str) -> tuple[RunGroup, list[str]]:
    """The named one, else FedAvg, else the first; and what there is to say about it."""
    where = f" on {task}" if task else ""
    exact = [group for group in groups if wanted in (group.label, group.method)]
    hits = exact or [group for group in groups if wanted is not None and _is_called(group, wanted)]
    if len(hits) > 1:
        labels = ", ".join(group.label for group in hits)
        raise ConfigError(f"--baseline {wanted!r} names {len(hits)} of these: {labels}; give one of them in full")
    if hits:
        return hits[0], []
    plain = [group for group in groups if group.runs[0].name == _PLAIN_METHOD]
    if not plain:
        alone = len(groups) == 1
        said = f"there is no run of plain {_PLAIN_METHOD}{where}, so differences are to {groups[0].label}"
        return groups[0], [] if alone else [said]
    several = f"there are {len(plain)} kinds of {_PLAIN_METHOD}{where}: differences are to {plain[0].label}"
    return plain[0], [several] if len(plain) > 1 else []


def ranking_of_task(groups: Sequence[RunGroup]) -> Ranking:
    """That of the baseline, which comes first; a run that is over knows it best."""
    runs = groups[0].runs
    return next((run for run in runs if run.finished), runs[0]).ranking


def _ranking_notes(groups: Sequence[RunGroup], task: str) -> list[str]:
    """Runs that name different metrics first."""
    first = {group.method or group.label: ranking_of_task([group]).metric for group in groups}
    if len(set(first.values())) == 1:
        return []
    said = "; ".join(f"{method}: {metric}" for method, metric in first.items())
    where, chosen = f" on {task}" if task else "", ranking_of_task(groups).metric
    return [f"runs{where} rank by different metrics ({said}): all are ranked by the baseline's, {chosen}"]


def _group_rank(group: RunGroup, ranking: Ranking) -> tuple[float, float, float]:
    """The larger the better: the mean of the metric of the global model, then of the clients' own, then the loss."""

    def mean(column: str, sign: int) -> float:
        values = [latest_value(run.table, column) for run in group.runs]
        found = sign * sum(values) / len(values)
        return found if found == found else float("-inf")

    whole, personal = ranking.columns
    return mean(whole, ranking.sign), mean(personal, ranking.sign), mean("loss", -1)
