"""Privacy that holds: noise that nobody without the secret takes off, and an epsilon that counts every release."""

import base64
import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import sparing
from sparing.core.context import EVERYONE, context
from sparing.core.errors import CheckpointError, ConfigError
from sparing.engines.engine import Job
from sparing.fleet.fleet import Fleet
from sparing.runs.files.growing_tables import GrowingTable
from sparing.runs.privacy import secret as secrets
from sparing.runs.privacy.accountant import _cohort_history, epsilon_of_cohorts
from sparing.runs.privacy.releases import Releases
from sparing.runs.privacy.secret import Secret
from support import Stop, changed, stop_after

STUDY = {"rounds": 4, "sample": 4, "seed": 1, "local": {"steps": 1}, "plan": {"path": "loop"}}
TASK = {"clients": 8, "model": "mlp"}
KEY = bytes(range(32))
MODES = {"central": [{"dp": {"noise": 2.0}}], "local": [{"dp": {"noise": 2.0, "mode": "local"}}]}
OBFUSCATE = [{"obfuscate": {"noise": 0.5, "rotate": True}}]


def broken(folder, method, after=3, **options):
    """A run that stopped after three rounds, of which its checkpoint has two."""
    with pytest.raises(Stop):
        sparing.run(TASK, method, out=folder, loggers=[stop_after(after)], **{**STUDY, "checkpoint": 2, **options})
    return folder


def test_the_secret_is_the_owners_alone_and_goes_when_the_run_ends(tmp_path):
    folder = broken(tmp_path / "a", MODES["central"])
    assert (folder / secrets.SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert (folder / secrets.SECRET_FILE).stat().st_size == 32
    result = sparing.resume(folder)
    assert not (folder / secrets.SECRET_FILE).exists()
    assert "the secret is deleted, so nobody can repeat this run" in result.privacy
    again = sparing.resume(folder)  # nothing is left to draw
    assert (again.model_sha256, again.epsilon) == (result.model_sha256, result.epsilon)


def test_a_secret_that_is_kept_repeats_the_run(tmp_path):
    first = sparing.run(TASK, MODES["central"], out=tmp_path / "a", keep_secret=True, **STUDY)
    key = (tmp_path / "a" / secrets.SECRET_FILE).read_bytes()
    assert sparing.run(TASK, MODES["central"], secret=key, **STUDY).model_sha256 == first.model_sha256
    assert sparing.run(TASK, MODES["central"], secret=KEY, **STUDY).model_sha256 != first.model_sha256
    assert "deleted" not in first.privacy


def test_a_client_on_its_own_machine_draws_what_the_server_draws_and_noise_that_nobody_else_does():
    server = Secret(KEY)
    ctx = context(0, 2, 9, [3], [4], 9, 90)
    node = secrets.new_client_secret(server.of_client(3).shared)
    assert torch.equal(node.words(ctx, "basis", 9), server.words(ctx, "basis", 9))
    values = torch.ones(1, 9)
    assert not torch.equal(node.words(ctx, "noise", 9, values), server.words(ctx, "noise", 9, values))


def test_a_run_without_a_secret_has_none(tmp_path):
    for i, method in enumerate(["fedavg", [{"dp": {"source": "seed"}}]]):
        with pytest.raises(Stop):
            sparing.run(TASK, method, out=tmp_path / str(i), loggers=[stop_after(1)], **STUDY)
        assert not (tmp_path / str(i) / secrets.SECRET_FILE).exists()


@pytest.mark.parametrize("method", [MODES["central"], MODES["local"], OBFUSCATE], ids=["central", "local", "obfuscate"])
def test_killed_and_resumed_it_ends_at_the_same_bits_and_epsilon(tmp_path, method):
    whole = sparing.run(TASK, method, secret=KEY, **STUDY)
    folder = broken(tmp_path / "a", method, secret=KEY)
    resumed = sparing.resume(folder)
    assert resumed.model_sha256 == whole.model_sha256
    np.testing.assert_equal(resumed.epsilon, whole.epsilon)
    assert [r.metrics for r in resumed.table] == [r.metrics for r in whole.table]


@pytest.mark.parametrize("damage", ["missing", "other", "short"])
def test_without_its_secret_a_run_does_not_go_on(tmp_path, damage):
    folder = broken(tmp_path / "a", MODES["central"])
    path, before = folder / secrets.SECRET_FILE, (folder / "rounds.csv").read_bytes()
    key = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(KEY if damage == "other" else b"short")
    with pytest.raises(CheckpointError, match=rf"{secrets.SECRET_FILE} (is missing|is not the secret|has 5 bytes)"):
        sparing.resume(folder)
    assert (folder / "rounds.csv").read_bytes() == before
    path.write_bytes(key)
    sparing.resume(folder)


def test_a_secret_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="a secret has 32 bytes, but 3 were given"):
        sparing.run(TASK, MODES["central"], secret=b"abc", **STUDY)


def taken_off(method, key=None):
    """How much of the noise is left after an observer, who has study and parcels, took off what it can draw.

    It replays the study with the public seed, and with a secret of its own, on the very uploads of the run.
    """
    study = {**STUDY, "rounds": 1, "sample": 8}
    truth = sparing.run(TASK, [{"dp": {**method[0]["dp"], "noise": 0.0, "source": "seed"}}], **study)
    real = sparing.run(TASK, method, secret=key, **study)
    noise = flat(real.model) - flat(truth.model)
    left = []
    for guess in ({"source": "seed"}, {"source": "secret"}):
        replay = sparing.run(TASK, [{"dp": {**method[0]["dp"], **guess}}], secret=KEY, **study)
        left.append((noise - (flat(replay.model) - flat(truth.model))).norm() / noise.norm())
    return min(left), noise.std()


def flat(model):
    return torch.cat([x.double().flatten() for x in model.values()])


@pytest.mark.parametrize("mode", MODES)
def test_noise_does_not_come_off_without_the_secret(mode):
    options = MODES[mode][0]["dp"]
    left, deviation = taken_off([{"dp": {**options, "source": "seed"}}])
    assert left < 1e-5, "by the seed it comes off: this is the attack that must fail below"
    assert deviation > 1e-3
    left, _ = taken_off([{"dp": options}])
    assert left > 1, "taking off unrelated noise only adds to it"


def test_with_the_secret_it_would_come_off():
    assert taken_off(MODES["central"], key=KEY)[0] < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_resumed_with_another_update_the_noise_is_unrelated_and_epsilon_counts_it(tmp_path, mode, monkeypatch):
    method = MODES[mode]
    options = {**STUDY, "sample": 8, "rounds": 3, "checkpoint": 2}
    whole = sparing.run(TASK, method, secret=KEY, **options)
    with pytest.raises(Stop):
        sparing.run(TASK, method, out=tmp_path / "a", loggers=[released(tmp_path / "a", 3)], secret=KEY, **options)
    train = Job.train

    def another(self, lesson, ctx):
        done = train(self, lesson, ctx)
        after = {name: x.clone() for name, x in done.after.items()}
        after[next(iter(after))][ctx.ids == 5] += 1e-4
        return done._replace(after=after)

    monkeypatch.setattr(Job, "train", another)
    resumed = sparing.resume(tmp_path / "a")
    apart, length = flat(resumed.model) - flat(whole.model), math.sqrt(2)
    scale = whole.table[-1].metrics.get("dp_noise")
    if scale:
        assert float(apart.std()) == pytest.approx(length * scale, rel=0.1), "two independent draws"
    assert float(apart.std()) > 1e-3, "the update changed by 1e-4, the noise by all of it"
    pool, times = (8, 8) if mode == "central" else (1, 1), 4
    assert resumed.epsilon == pytest.approx(epsilon_of_cohorts(2.0, Counter({pool: times}), 8**-1.1))
    assert resumed.epsilon > whole.epsilon


def released(folder, t):
    """Stops a run when the round is released but not yet in any checkpoint."""

    def log(record):
        if record.round == t - 1:
            (folder / "copy").mkdir()
            for path in folder.iterdir():
                if path.is_file():
                    (folder / "copy" / path.name).write_bytes(path.read_bytes())
        if record.round == t:
            for path in (folder / "copy").iterdir():
                if path.name != "releases.csv":
                    (folder / path.name).write_bytes(path.read_bytes())
            raise Stop

    return log


def test_a_line_is_durable_before_anything_of_its_round_is_written(tmp_path, monkeypatch):
    folder, seen = tmp_path / "a", []
    append = GrowingTable.append

    def looking(self, text):
        if self.path.name == "rounds.csv" and text[:1].isdigit():
            t = int(text.split(",")[0])
            lines = (folder / "releases.csv").read_text().splitlines()[1:]
            seen.append((t, [line.split(",")[0] for line in lines].count(str(t))))
        append(self, text)

    monkeypatch.setattr(GrowingTable, "append", looking)
    sparing.run(TASK, MODES["central"], out=folder, **STUDY)
    assert seen == [(t, 1) for t in range(1, 5)]


def test_kept_uploads_are_released_before_they_are_written(tmp_path, monkeypatch):
    from sparing.runs.files import kept_parcels

    folder, save, seen = tmp_path / "a", kept_parcels._save_parcel, []

    def looking(path, data, schemas):
        if "-up" in path.name:
            t, who = int(path.parent.name[6:]), int(path.name[7:12])
            lines = (folder / "releases.csv").read_text().splitlines()[1:]
            seen.append([tuple(map(int, line.split(",")[:2])) for line in lines].count((t, who)))
        save(path, data, schemas)

    monkeypatch.setattr(kept_parcels, "_save_parcel", looking)
    sparing.run(
        TASK, MODES["local"], out=folder, **{**STUDY, "plan": {"parcels": "kept", "path": "loop"}, "engine": "debug"}
    )
    assert seen == [1] * 16


def test_a_budget_stops_a_second_release(tmp_path, monkeypatch):
    once = epsilon_of_cohorts(2.0, Counter({(8, 8): 3}), 8**-1.1)
    method = [{"dp": {"noise": 2.0, "epsilon": once * 1.001}}]
    options = {**STUDY, "sample": 8, "rounds": 3, "checkpoint": 2}
    with pytest.raises(Stop):
        sparing.run(TASK, method, out=tmp_path / "a", loggers=[released(tmp_path / "a", 3)], secret=KEY, **options)
    train = Job.train

    def another(self, lesson, ctx):
        done = train(self, lesson, ctx)
        return done._replace(after={name: x * 1.01 for name, x in done.after.items()})

    monkeypatch.setattr(Job, "train", another)
    lines = (tmp_path / "a/releases.csv").read_bytes()
    with pytest.raises(CheckpointError, match=r"round 3 comes to other values .* more than dp.epsilon"):
        sparing.resume(tmp_path / "a")
    assert (tmp_path / "a/releases.csv").read_bytes() == lines, "it was not released"


def test_releases_that_were_altered_or_torn(tmp_path):
    folder = broken(tmp_path / "a", MODES["central"], secret=KEY)
    path = folder / "releases.csv"
    good = path.read_bytes()
    assert [line.split(",")[:2] for line in good.decode().splitlines()[1:]] == [["1", "-1"], ["2", "-1"], ["3", "-1"]]
    for place in (len(good) - 30, len(good) // 2):  # behind the checkpoint's mark, and before it
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"releases.csv was altered"):
            sparing.resume(folder)
    path.write_bytes(good + b"4,-1,abc")  # a crash while it was written
    whole = sparing.run(TASK, MODES["central"], secret=KEY, **STUDY)
    assert sparing.resume(folder).epsilon == whole.epsilon
    assert path.read_bytes().startswith(good)
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.parametrize("source", ["secret", "seed"])
def test_who_takes_part_comes_from_the_secret_where_epsilon_counts_on_it(tmp_path, source):
    options = {**STUDY, "sample": 2, "rounds": 6}
    sparing.run(TASK, [{"dp": {"noise": 2.0, "source": source}}], out=tmp_path / "a", secret=KEY, **options)
    rows = [line.split(",") for line in (tmp_path / "a/ledger.csv").read_text().splitlines()[1:]]
    found = [sorted({int(r[1]) for r in rows if int(r[0]) == t}) for t in range(1, 7)]
    public = [Fleet().cohort(1, t, 8, 2).tolist() for t in range(1, 7)]
    assert (found == public) == (source == "seed")
    if source == "secret":
        assert found == [Fleet(draw=Secret(KEY).cohort).cohort(1, t, 8, 2).tolist() for t in range(1, 7)]


def test_local_noise_leaves_cohorts_to_the_seed(tmp_path):
    """There epsilon counts no amplification: the server knows who sends what."""
    sparing.run(TASK, MODES["local"], out=tmp_path / "a", **STUDY)
    rows = [line.split(",") for line in (tmp_path / "a/ledger.csv").read_text().splitlines()[1:]]
    for t in range(1, 5):
        assert sorted({int(r[1]) for r in rows if int(r[0]) == t}) == Fleet().cohort(1, t, 8, 4).tolist()


def spellings(key):
    return [key, key.hex().encode(), base64.b64encode(key).rstrip(b"="), repr(key)[2:-1].encode(), key[:16], key[16:]]


@pytest.mark.parametrize("method", [MODES["central"], MODES["local"], OBFUSCATE], ids=["central", "local", "obfuscate"])
def test_nothing_a_run_writes_or_exports_holds_the_secret(tmp_path, monkeypatch, method):
    from typer.testing import CliRunner

    from sparing.cli.app import app

    monkeypatch.chdir(tmp_path)
    plan = {"plan": {"parcels": "kept", "path": "loop"}, "engine": "debug"}
    sparing.run(TASK, method, out=tmp_path / "a", keep_secret=True, **{**STUDY, **plan})
    key = (tmp_path / "a" / secrets.SECRET_FILE).read_bytes()
    for words in (["compare", "a", "--h5", "h5"], ["report", "a", "-o", "a.html", "--figures", "f"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "a/secret.key is left out" in " ".join(done.stderr.split())
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != secrets.SECRET_FILE:
            data = path.read_bytes()
            assert not any(word in data for word in spellings(key)), path


def test_it_is_forgotten_on_demand(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from sparing.cli.app import app

    folder = broken(tmp_path / "a", MODES["central"])
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["forget", "a"])
    assert done.exit_code == 0
    assert "nobody can repeat or resume this run" in " ".join(done.output.split())
    assert not (folder / secrets.SECRET_FILE).exists()
    with pytest.raises(CheckpointError, match=r"secret.key is missing"):
        sparing.resume(folder)
    done = CliRunner().invoke(app, ["forget", "a"])
    assert "a holds no secret" in done.output
    assert CliRunner().invoke(app, ["forget", "nowhere"]).exit_code == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"source": "seed"}, "protects nobody: the noise follows the study's public seed"),
        ({}, "holds for whoever sees the models but not ledger.csv, clients.csv or kept parcels"),
        ({"mode": "local"}, "holds for whoever sees every upload and knows whose it is"),
    ],
    ids=["seed", "central", "local"],
)
def test_it_is_said_beside_epsilon_for_whom_it_holds(tmp_path, monkeypatch, options, said):
    from typer.testing import CliRunner

    from sparing.cli.app import app

    monkeypatch.chdir(tmp_path)
    method = yaml.safe_dump([{"dp": {"noise": 2.0, **options}}], default_flow_style=True).strip()
    words = ["run", f"method={method}", "rounds=2", "sample=4", "local.steps=1", "task.clients=8", "task.model=mlp"]
    done = CliRunner().invoke(app, [*words, "--out", "a"])
    assert done.exit_code == 0, done.output
    assert said in " ".join(done.output.split())
    assert said in json.loads(Path("a/summary.json").read_text())["privacy"]
    assert CliRunner().invoke(app, ["report", "a"]).exit_code == 0
    assert said in " ".join(Path("report.html").read_text().replace("&#39;", "'").split())


def test_words_are_the_same_alone_and_together():
    secret, ids = Secret(KEY), torch.tensor([3, 5])
    ctx, x = context(0, 2, 9, ids, ids, 9, 90), torch.randn(2, 7)
    both = secret.words(ctx, "a", 10, x)
    assert torch.equal(both[1], secret.words(ctx.at(slice(1, 2)), "a", 10, x[1:])[0])
    other = x.clone()
    other[1, 3] += 1e-7
    assert torch.equal(secret.words(ctx, "a", 10, other)[0], both[0])
    for words in (
        secret.words(ctx, "a", 10, other)[1],
        secret.words(ctx, "b", 10, x)[1],
        secret.words(ctx._replace(round=3), "a", 10, x)[1],
        secret.words(changed(ctx, ids=torch.tensor([3, 6])), "a", 10, x)[1],
        Secret(bytes(32)).words(ctx, "a", 10, x)[1],
    ):
        assert not bool((words == both[1]).any())


def test_a_cohort_that_is_released_twice_was_sampled_once():
    """Counting it as two cohorts would take the amplification twice: 1.27 instead of 2.63."""
    twice = epsilon_of_cohorts(2.0, Counter({(1000, 20, 2): 1}), 1e-5)
    assert twice == epsilon_of_cohorts(2.0 / math.sqrt(2), Counter({(1000, 20): 1}), 1e-5)
    assert twice > epsilon_of_cohorts(2.0, Counter({(1000, 20): 2}), 1e-5)
    releases, fleet = Releases(), Fleet()
    releases.add(1, {EVERYONE: "a"})
    releases.add(1, {EVERYONE: "b"})
    *_, found = zip(range(3), _cohort_history(fleet, 1000, 20, 0, releases), strict=False)
    assert found[1] == Counter({(1000, 20, 2): 1, (1000, 20): 1})


def test_a_line_that_lost_its_end_is_not_taken_for_one_never_written(tmp_path):
    folder = broken(tmp_path / "a", MODES["central"], secret=KEY)
    path = folder / "releases.csv"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"releases.csv was altered"):
        sparing.resume(folder)


def test_obfuscation_alone_keeps_no_digests(monkeypatch):
    made = []

    class Watched(Secret):
        def __init__(self, key=None):
            super().__init__(key)
            made.append(self)

    monkeypatch.setattr(sys.modules["sparing.runs.start"], "Secret", Watched)
    sparing.run(TASK, OBFUSCATE, **STUDY)
    assert [secret.drawn for secret in made] == [{}]


def test_what_is_written_of_a_release_says_nothing_without_the_secret():
    """A plain digest of the values before the noise would tell a right guess of them from a wrong one."""
    ids, x = torch.tensor([EVERYONE]), torch.randn(1, 7)
    ctx, found = context(0, 2, 9, ids, ids, 9, 90), []
    for key in (KEY, KEY, bytes(32)):
        secret = Secret(key)
        secret.words(ctx, "a", 10, x)
        found.append(secret.released(2)[EVERYONE])
    assert found[0] == found[1] != found[2]


def test_releases_count_distinct_lines():
    releases = Releases()
    assert releases.count(1, EVERYONE) == 1
    assert not releases.add(1, {EVERYONE: "a"})
    assert not releases.add(1, {EVERYONE: "a"})
    assert releases.add(1, {EVERYONE: "b"})
    assert releases.count(1, EVERYONE) == 2
