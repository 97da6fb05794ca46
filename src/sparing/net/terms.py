"""What a server tells its nodes once about the study, as JSON: the terms on which both work.

Terms hold names and numbers only. No file and no module can be named in them: where the study's model or loss is code
of one's own, every node names its own copy on its command line, and only digests are compared.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

import sparing
from sparing.core.errors import ConfigError, WireError
from sparing.core.tree import tree_sha256
from sparing.data.augment import read_augmentations
from sparing.data.clients import Pair
from sparing.data.options import name_and_options
from sparing.engines.engine import Job
from sparing.net.letter import MOST_TERMS
from sparing.runs.own_code import code_of_study
from sparing.runs.plan.step_pieces import PIECE_KEYS
from sparing.runs.privacy.secret import ClientSecret
from sparing.runs.start import settle_study
from sparing.runs.study import OWN_TASK, Study, study_from
from sparing.tasks.apart import task_of_client
from sparing.tasks.build import network_builder, own_loss
from sparing.tasks.code import is_code

_DEEPEST = 16  # brackets within each other
_MOST_CLIENTS = 1 << 24
_KEPT = {"method", "personalization", "local", "rounds", "sample", "seed", "secure"}
_TOLD_PLAN = ("path", "precision", *PIECE_KEYS)
_SAID = {*_KEPT, "task", "plan", "task.model", "task.augment", *(f"plan.{key}" for key in _TOLD_PLAN)}
"""Keys of a study that terms may hold."""


class Terms(BaseModel):
    """What both ends agree on."""

    model_config = ConfigDict(extra="forbid")

    sparing: str  # versions
    torch: str
    study: dict[str, Any]  # as much of it as a node needs
    clients: int = Field(gt=0, le=_MOST_CLIENTS)
    shape: list[PositiveInt]  # of a sample
    classes: PositiveInt
    model: str  # SHA-256 of the initial model
    code: dict[str, str]  # of what the study names of one's own code: its key and SHA-256
    evaluate: Literal["server", "clients"]  # whose test samples are asked

    def to_bytes(self) -> bytes:
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()


def terms_of(study: Study, job: Job, shape: tuple[int, ...], classes: int, copies: Path | None = None) -> Terms:
    """The server's."""
    values = study.model_dump(include=_KEPT, exclude_defaults=True)
    named = study.task.model if "task.model" not in study.code() else OWN_TASK
    values["task"] = {"model": named, "augment": study.task.augment}
    values["plan"] = {key: getattr(study.plan, key) for key in _TOLD_PLAN}
    return Terms(
        sparing=sparing.__version__,
        torch=torch.__version__.partition("+")[0],
        study=values,
        clients=len(job.task),
        shape=list(shape),
        classes=classes,
        model=tree_sha256(job.first_tensors),
        code={one.key: one.sha256 for one in code_of_study(study, copies) if one.key in ("task.model", "task.loss")},
        evaluate=study.network.evaluate,
    )


def digest_of(data: bytes) -> bytes:
    """16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def read_terms(body: bytes) -> Terms:
    """A node's reading of what a server sent; a ConfigError says what it cannot agree to."""
    if len(body) > MOST_TERMS or _depth(body) > _DEEPEST:
        raise WireError(f"terms of {len(body)} bytes, nested {_depth(body)} deep, are none that sparing writes")
    try:
        terms = Terms.model_validate_json(body)
    except ValidationError as error:
        raise WireError(
            f"the terms cannot be read ({error.errors()[0]['msg']}); install the same sparing on both"
        ) from None
    for what, here, there in (
        ("sparing", sparing.__version__, terms.sparing),
        ("torch", torch.__version__.partition("+")[0], terms.torch),
    ):
        if here != there:
            raise ConfigError(f"this node has {what} {here}, the server {there}; install {what} {there} here")
    return terms


def _depth(body: bytes) -> int:
    """How deep brackets stand within each other, at most; those in texts count too."""
    deepest = now = 0
    for byte in body[: MOST_TERMS + 1]:
        now += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, now)
    return deepest


class OwnCode(BaseModel):
    """What a node's command line names of its own: `my_file.py:Net`, with options if it has any."""

    model: str | dict[str, Any] | None = None
    loss: str | dict[str, Any] | None = None


def node_job(terms: Terms, client: int, train: Pair, test: Pair | None, own: OwnCode, secret: ClientSecret) -> Job:
    """What this client needs to take part, on its own samples."""
    study = _study_in(terms, own)
    _refuse_other_code(terms, study)
    model, loss = study.task.model, study.task.loss
    assert model is not None
    task = task_of_client(
        network_builder(model, tuple(terms.shape), terms.classes, None, None, torch.as_tensor(train[1][:1]).ndim > 1),
        client,
        terms.clients,
        train,
        test,
        loss=None if loss is None else own_loss(loss),
        augment=(lambda shape: read_augmentations(study.task.augment, shape)) if study.task.augment else None,
        name="a node's own",
    )
    job, _ = settle_study(study, task, secret)
    found = tree_sha256(job.first_tensors)
    if found != terms.model:
        raise ConfigError(
            f"this node's initial model has SHA-256 {found[:12]}, the server's {terms.model[:12]}: use the same model, "
            "options and versions on both sides"
        )
    return job


def _study_in(terms: Terms, own: OwnCode) -> Study:
    """The server's study with this node's own code; what names a file or a module in it is refused."""
    task, plan = (terms.study[key] if isinstance(terms.study.get(key), dict) else {} for key in ("task", "plan"))
    said = [*terms.study, *(f"task.{key}" for key in task), *(f"plan.{key}" for key in plan)]
    odd = next((key for key in said if key not in _SAID), None)
    if odd is not None:
        raise ConfigError(
            f"the server's terms hold {odd[:60]!r}, which no node needs; install the same sparing on both"
        )
    named = task.get("model")
    if named == OWN_TASK:
        if own.model is None:
            raise ConfigError(
                "the study's model is code of the server's own; name this node's copy: --model my_file.py:Net"
            )
        named = own.model
    elif named is None or is_code(name_and_options("model", named)[0]):
        raise ConfigError(
            f"the server's terms name the model {named!r}, which is none of sparing's; it must not name code"
        )
    values = dict(terms.study) | {"engine": "debug", "device": "cpu"}
    values["task"] = {"data": {OWN_TASK: {"name": "a node's own"}}, "split": None, "augment": task.get("augment", [])}
    values["task"] |= {"model": named, "loss": own.loss}
    values["plan"] = {"chunk": 1, "threads": 1, "bank": "memory"} | plan
    return study_from(values, "the server's terms")


def _refuse_other_code(terms: Terms, study: Study) -> None:
    here = {one.key: one.sha256 for one in code_of_study(study)}
    for key in sorted(here.keys() | terms.code.keys()):
        mine, theirs = here.get(key, "none"), terms.code.get(key, "none")
        if mine != theirs:
            raise ConfigError(
                f"{key}: this node's file has SHA-256 {mine[:12]}, the server's {theirs[:12]}; use one file on both"
            )
