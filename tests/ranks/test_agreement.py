"""What ranks must have in common is refused in a sentence where they do not; where ranks are from the environment."""

from typing import Any

import pytest

from ranks.players import end_of, free_port, rank_environment
from ranks.test_ends import write_study
from sparing.core.errors import ConfigError, RankError
from sparing.ranks.agreement import code_facts, refuse_disagreement, refuse_other_models, refuse_unshared_folder
from sparing.ranks.rank_place import RankPlace, first_host, rank_place


class Told:
    """Ranks, of which the others say this."""

    is_first, rank, world = True, 0, 2

    def __init__(self, *others: Any):
        self.others = others

    def gather_json(self, value: Any) -> list[Any]:
        return [value, *self.others]

    def agreed(self, value: Any) -> Any:
        return value

    def wait_for_all(self) -> None:
        pass


def test_facts_that_differ_are_named():
    facts = code_facts() | {"study": "abc"}
    refuse_disagreement(Told(facts), facts)  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"rank 1 has another version of torch than rank 0 \(2.0, not .*\); give all"):
        refuse_disagreement(Told(facts | {"version of torch": "2.0"}), facts)  # type: ignore[arg-type]
    with pytest.raises(RankError, match="rank 2 has another study than rank 0"):
        refuse_disagreement(Told(facts, facts | {"study": "abd"}), facts)  # type: ignore[arg-type]


def test_a_folder_that_is_not_shared(tmp_path):
    refuse_unshared_folder(Told(True), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"rank 1 does not see .*; use a folder that all machines share"):
        refuse_unshared_folder(Told(False), tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_ranks_that_come_to_other_models():
    with pytest.raises(
        RankError, match=r"after round 3 rank 1 has another model than rank 0; use machines of one kind"
    ):
        refuse_other_models(Told("0" * 64), {}, 3)  # type: ignore[arg-type]


def test_another_study_on_another_rank(tmp_path):
    import subprocess
    import sys

    path, port = write_study(tmp_path), free_port()
    items = [[], ["local.lr=0.06"]]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "sparing", "run", str(path), "--out", str(tmp_path / "run")]
    ends = end_of(
        [subprocess.Popen([*command, *items[rank]], env=rank_environment(rank, 2, port), **pipes) for rank in range(2)]
    )
    assert [code for code, _, _ in ends] == [2, 2]
    said = [line for _, _, text in ends for line in text.splitlines() if line.startswith("sparing:")]
    assert said == [said[0]]
    assert "rank 1 has another study than rank 0" in said[0]
    assert not (tmp_path / "run").exists()


MEETING = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, None),  # a batch script without srun
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | MEETING,
         RankPlace(2, 4, 1, 2, "a", 1)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
          "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "70001"}, RankPlace(5, 8, 1, 4, "gpu03", 30001)),
    ],
)  # fmt: skip
def test_places(environment, place):
    assert rank_place(environment) == place


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', no number"),
        ({"RANK": "2", "WORLD_SIZE": "2"} | MEETING, "this process is rank 2 of 2; ranks count from 0"),
    ],
)
def test_places_that_cannot_be(environment, why):
    with pytest.raises(ConfigError, match=why):
        rank_place(environment)


def test_hosts_as_slurm_writes_them():
    assert [first_host(x) for x in ("n1", "n[1-3]", "a,b", "x[07,09]y,z")] == ["n1", "n1", "a", "x07y"]
