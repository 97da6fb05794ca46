"""Every recipe there is: it obeys the law, or it is refused and another is named."""

from typing import Any

import pytest

import sparing
from secure_round.studies import CNN, TASK, play
from sparing.core.errors import MethodError
from sparing.core.registry import known_recipes

OPTIONS: dict[str, Any] = {
    "budget": {"budget": "900B"},
    "lora": {"lora": {"targets": ["head"]}},
    "norm-bound": {"norm-bound": {"bound": 0.5}},
    "obfuscate": {"obfuscate": {"noise": 0.1}},
    "psfed": {"psfed": {"fraction": 0.3}},
}
BEFORE = {"tight": ["int8"], "memory": [{"int8": {"common": True}}]}  # what a recipe needs before it
CONVOLUTIONS = {"fedscr", "fedhm"}
NOISE_OF_ITS_OWN = {"dp"}  # from clients with masks, from the server without
FITS = {
    *("broadcast", "ditto", "dp", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbabu", "fedper", "fedprox"),
    *("fedrep", "fedsim", "fedyogi", "finetune", "lg-fedavg", "local", "lora", "memory", "personal", "pfedsim"),
    *("prune", "psfed", "scaffold", "sr-fedavg", "stein"),
}
"""As docs/secure.md says."""


@pytest.mark.parametrize("name", sorted(known_recipes()))
def test_a_recipe_obeys_the_law_or_names_another(name, tmp_path):
    method, task = [*BEFORE.get(name, []), OPTIONS.get(name, name)], CNN if name in CONVOLUTIONS else TASK
    try:
        runs = play(method, tmp_path, task, secret=bytes(range(32)))
    except MethodError as error:
        assert name not in FITS
        why, fix = str(error).split("; ", 1)
        assert why.startswith("secure: the server sees sums only, but")
        assert any(word in fix for word in ("use {", "drop", "let all", "set ")), fix
        return
    assert name in FITS
    assert runs.debug.model_sha256 == runs.vector.model_sha256
    assert runs.ledger("debug") == runs.ledger("vector")
    assert (runs.open.model_sha256 == runs.debug.model_sha256) is (name not in NOISE_OF_ITS_OWN)


REFUSED: dict[str, Any] = {
    "use {randk: {shared: true}}": ["topk", "memory"],
    "use {int8: {common: true}}": ["psfed", "int8"],
    "psfed without per_client": [{"psfed": {"per_client": True}}],
    "let it weigh clients alike: {scaffold: {weights: uniform}}": [{"scaffold": {"weights": "samples"}}],
    "with fedsim set `on: weights`": [{"fedsim": {"on": "updates"}}],
    "use target: ema": [{"stein": {"target": "uniform"}}],
    "use its mode: seed": [{"pfedsim": {"mode": "published", "warmup": 0.4}}],
    "by local.clip or dp": ["median"],
    "drop it: masks hide what a client sends": [{"obfuscate": {"noise": 0.1}}],
    "masked ones take as many as others; drop it": [{"int8": {"common": True}}, "tight"],
    "use {int8: {common: true}} with memory": ["int8", "ef21"],
}


@pytest.mark.parametrize("fix", REFUSED)
def test_what_does_not_add_up_names_what_does(fix):
    with pytest.raises(MethodError) as error:
        sparing.run(TASK, REFUSED[fix], rounds=1, sample=5, secure=True)
    assert fix in str(error.value)
    assert "\n" not in str(error.value)
