"""What a study may ask of secure aggregation, and how it is told what it may not: one sentence, with the fix."""

import pytest

import sparing
from secure_round.studies import STUDY, TASK
from sparing.core.errors import ConfigError, SecureError
from sparing.runs.study import study_from
from sparing.secure_round.settings import SecureSettings


def test_how_many_honest_clients_are_in_every_sum():
    for n in (5, 10, 20, 40, 50, 60, 100):
        for colluding in (0, 1, 2):
            settings = SecureSettings(colluding=colluding)
            terms = settings.terms(bytes(16), 1, 1, range(n), 1, 8)
            assert settings.honest(n) <= terms.least - colluding
            if not settings.why_too_few(n):
                assert settings.honest(n) >= settings.clients
            assert 2 * terms.threshold > terms.degree + colluding


def test_a_share_is_rounded_up_to_clients():
    assert SecureSettings(least=0.8).terms(bytes(16), 1, 1, range(10), 1, 8).least == 8
    assert SecureSettings(least=0.81).terms(bytes(16), 1, 1, range(10), 1, 8).least == 9
    assert SecureSettings(least=9).terms(bytes(16), 1, 1, range(10), 1, 8).least == 9
    assert SecureSettings(least=1.0).terms(bytes(16), 1, 1, range(10), 1, 8).least == 10


def test_more_needed_uploads_mean_more_honest_clients():
    found = [SecureSettings(least=least).honest(30) for least in (20, 25, 30)]
    assert found == [13, 23, 30]


def test_of_few_too_many_may_not_collude():
    with pytest.raises(SecureError):
        SecureSettings().honest(2)
    assert SecureSettings(colluding=3).why_too_few(5)
    assert not SecureSettings(colluding=3).why_too_few(20)
    with pytest.raises(ConfigError, match=r"secure, with 5 clients a round: .*; raise sample"):
        SecureSettings(colluding=3).check(5)


WRONG = {
    "maybe": ({"secure": "maybe"}, r"secure is .maybe.; set it to true or false"),
    "two clients": ({"secure": {"clients": 2}}, r"secure\.clients: .*greater than or equal to 3"),
    "a negative number": ({"secure": {"colluding": -1}}, r"secure\.colluding"),
    "a share above one": ({"secure": {"least": 1.5}}, r"secure\.least is 1\.5; a share lies between 0 and 1"),
    "an unknown key": ({"secure": {"client": 4}}, r"unknown key .secure\.client.; .*clients"),
    "no neighbours": ({"secure": {"degree": 0}}, r"secure\.degree"),
    "a sample of two": ({"secure": True, "sample": 2}, r"takes 3 to .*; raise sample"),
    "many who collude": ({"secure": {"colluding": 4}}, r"with 6 clients a round: .*; raise sample, or change secure"),
    "few uploads": ({"secure": {"least": 2}}, r"a sum of 2 uploads .* between 4 and 6; raise sample, or change"),
    "many clients": ({"secure": {"clients": 7}}, r"with 6 clients a round: .*; raise sample, or change secure"),
    "few neighbours": ({"secure": {"degree": 2}}, r"up to 50 clients it must be all others.*; raise sample, or"),
    "a deadline": (
        {"secure": True, "fleet": {"deadline": 10.0, "links": "4g"}},
        r"fleet\.deadline .*; drop it, or simulate losses by fleet\.dropout",
    ),
    "kept parcels": ({"secure": True, "plan": {"parcels": "kept"}, "engine": "debug"}, r"plan\.parcels.*; drop one"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_told_in_one_sentence_with_its_fix(what, tmp_path):
    values, words = WRONG[what]
    with pytest.raises(ConfigError, match=words) as error:
        sparing.run(TASK, out=tmp_path / "run", **STUDY | values)
    told = str(error.value)
    assert "\n" not in told
    assert "; " in told or "(seen: " in told, told


@pytest.mark.parametrize("values", [True, {}, {"clients": 3, "colluding": 0, "least": None, "degree": None}])
def test_true_is_the_section_as_it_stands(values):
    assert study_from({"secure": values}) == study_from({"secure": True})
    assert study_from({"secure": False}) == study_from({})
    assert SecureSettings(**study_from({"secure": values}).secure.model_dump()) == SecureSettings()


def test_a_study_with_it_is_written_and_read_again():
    study = study_from({"secure": {"least": 0.9}})
    assert study_from(study.model_dump()) == study
