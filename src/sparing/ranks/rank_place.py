"""Which rank of a run this process is, from the environment that torchrun, Slurm or a cluster gives it."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from sparing.core.errors import ConfigError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Without these a process is alone."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
_FIRST_PORT, _PORTS = 20_000, 20_000
"""Of Slurm jobs, whose number says which one they take."""


class RankPlace(NamedTuple):
    rank: int
    world: int  # ranks in all
    local_rank: int = 0  # among those on this machine
    local_world: int = 1
    address: str = "127.0.0.1"  # where the ranks meet
    port: int = 29500


def rank_place(environment: Mapping[str, str]) -> RankPlace | None:
    """None: this process is alone.

    >>> rank_place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "29500"})
    RankPlace(rank=1, world=4, local_rank=0, local_world=1, address='here', port=29500)
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        place = _torchrun_place(environment)
    elif all(name in environment for name in _SLURM):
        place = _slurm_place(environment)
    else:
        if environment.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']}, but RANK is not set; start the ranks with torchrun, or "
                "unset it"
            )
        return None
    if not 0 <= place.rank < place.world:
        raise ConfigError(f"this process is rank {place.rank} of {place.world}; ranks count from 0")
    return place if place.world > 1 else None


def _torchrun_place(environment: Mapping[str, str]) -> RankPlace:
    rank, world = (_whole_number(environment, name) for name in _TORCHRUN[:2])
    if world > 1 and not all(name in environment for name in _TORCHRUN):
        missing = next(name for name in _TORCHRUN if name not in environment)
        raise ConfigError(f"WORLD_SIZE is {world}, but {missing} is not set; start the ranks with torchrun or srun")
    local = _whole_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0
    beside = _whole_number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else 1
    port = _whole_number(environment, "MASTER_PORT") if world > 1 else 0
    return RankPlace(rank, world, local, beside, environment.get("MASTER_ADDR", ""), port)


def _slurm_place(environment: Mapping[str, str]) -> RankPlace:
    rank, world = _whole_number(environment, "SLURM_PROCID"), _whole_number(environment, "SLURM_STEP_NUM_TASKS")
    local = int(environment.get("SLURM_LOCALID", 0))
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    address = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    port = int(environment.get("MASTER_PORT", _FIRST_PORT + _whole_number(environment, "SLURM_JOB_ID") % _PORTS))
    return RankPlace(rank, world, local, int(tasks[0]) if tasks else 1, address, port)


def first_host(hosts: str) -> str:
    """The first of a list of hosts as Slurm writes it.

    >>> first_host("gpu[003-005,9],cpu1"), first_host("node7,node8"), first_host("a-[1,4]-ib")
    ('gpu003', 'node7', 'a-1-ib')
    """
    found = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", hosts)
    return "".join(part or "" for part in found.groups()) if found else hosts


def _whole_number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(f"{name} is {environment[name]!r}, no number; start the ranks with torchrun") from None
