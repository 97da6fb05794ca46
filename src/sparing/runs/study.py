"""The study: what a run is, as YAML, as `key=value` overrides, or as Python arguments. Unknown keys are refused."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from sparing.core.byte_sizes import bytes_of_text
from sparing.core.errors import ConfigError, nearest_name
from sparing.core.optimiser import Optimiser
from sparing.data.files.unpacking import one_line
from sparing.data.options import name_and_options
from sparing.runs.known_names import refuse_misspelt_optimiser
from sparing.tasks.code import CODE_KEYS, CodeCall, code_in, is_code, place_beside
from sparing.train.metric_names import known_metric
from sparing.train.schedules import read_schedule

if TYPE_CHECKING:
    from sparing.core.method import Local

USUAL_EPOCHS, USUAL_BATCH, USUAL_LR = 5, 10, 0.1
"""As a Phase has them; written down here because studies are read without torch."""
_SHORT_OPTIONS = {"budget": "bytes"}
"""Recipes behind which the value of one option may stand alone."""
_BoolOrAuto = StrictBool | Literal["auto"]
SCIENTIFIC_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-3 as a word


class StudySection(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def no_truths(cls, values: Any) -> Any:
        """Hardly a key here means yes or no, and YAML is quick to read a word as one."""
        for key, value in values.items() if isinstance(values, dict) else ():
            known = cls.model_fields.get(key)
            if isinstance(value, bool) and (known is None or known.annotation not in (bool, _BoolOrAuto)):
                raise ValueError(f"{key} is {str(value).lower()}, which no key can be; quote it if it is a word")
        return values


OWN_TASK = "your own"  # what task.data is for a Task given in Python; its name and fingerprint are options of it


class TaskSection(StudySection):
    data: str | dict[str, Any] = "digits"
    clients: PositiveInt | None = None  # 20 where the split does not say
    split: str | dict[str, Any] | None = {"dirichlet": 0.3}
    model: str | dict[str, Any] | None = "cnn"
    test: float = Field(default=0.25, ge=0, lt=1)  # share of a client's samples, where there is no official test set
    validation: float = Field(default=0.0, ge=0, lt=1)
    held_out: NonNegativeInt | NonNegativeFloat = 0  # clients that never train: a count or a share
    probe: NonNegativeInt | NonNegativeFloat = 0  # training samples that the server keeps: a count or a share
    augment: list[Any] = []
    loss: str | dict[str, Any] | None = None  # code of one's own; by default cross entropy, or for floats squared error

    @model_validator(mode="after")
    def clients_of_a_loader(self) -> "TaskSection":
        """A loader of one's own says who holds what, and so do texts by client, unless a split is given."""
        if "split" not in self.model_fields_set:
            name = next(iter(self.data), "") if isinstance(self.data, dict) else self.data
            self.split = None if "data" in self.code() else "client" if name.startswith("text:") else self.split
        return self

    def code(self) -> dict[str, CodeCall]:
        """What it names of code that is not ours, by its keys."""
        return code_in({key: getattr(self, key) for key in CODE_KEYS})


class LocalSection(StudySection):
    epochs: PositiveInt | None = None  # the phase's own where neither epochs nor steps are given
    steps: PositiveInt | None = None
    batch: int = Field(default=USUAL_BATCH, ge=1, lt=2**63)
    optimiser: str = "sgd"  # or adam, adamw, or a class of torch.optim; optimizer is the same key
    lr: PositiveFloat = USUAL_LR
    schedule: str | dict[str, Any] = "constant"  # of lr over rounds: cosine, step, exponential
    warmup: NonNegativeInt = 0  # rounds in which lr rises
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: StrictBool = False
    velocity: Literal["fresh", "kept"] = "fresh"  # kept: a client's momentum goes on from its last round
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = None
    options: dict[str, Any] = {}  # of a class of torch.optim, such as {betas: [0.9, 0.95]}
    prox: NonNegativeFloat = 0.0
    buffers: Literal["shared", "own", "static"] = "shared"

    @model_validator(mode="before")
    @classmethod
    def one_spelling(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "optimizer" not in values:
            return values
        if "optimiser" in values:
            raise ValueError("local has optimiser and optimizer, which are one key; give one of them")
        return {"optimiser" if key == "optimizer" else key: value for key, value in values.items()}

    @model_validator(mode="after")
    def one_meaning(self) -> "LocalSection":
        self.optimiser = self.optimiser.lower()
        if self.steps is None and self.epochs is None:
            self.epochs = USUAL_EPOCHS
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"local has epochs {self.epochs} and steps {self.steps}; give one of them")
        if self.velocity == "kept" and not self.momentum:
            raise ValueError("local.velocity is kept, but there is no momentum to keep; set local.momentum to 0.9")
        if self.optimiser in ("adam", "adamw") and self.momentum:
            raise ValueError(f"local.momentum is {self.momentum}, which {self.optimiser} has no use for; drop it")
        if self.nesterov and not self.momentum:
            raise ValueError("local.nesterov is true, but there is no momentum; set local.momentum to 0.9")
        if self.velocity == "kept" and (self.optimiser != "sgd" or self.options):
            raise ValueError(f"local.velocity is kept, which sgd without options can, seen {self.optimiser}; drop it")
        try:
            optimiser = self._optimiser()
            if not optimiser.known_everywhere:
                refuse_misspelt_optimiser(optimiser, "local.optimiser: ")
                from sparing.train.torch_optimisers import check_optimiser

                check_optimiser(optimiser, "local.optimiser: ")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def local(self) -> "Local":
        from sparing.core.method import Local, Phase, nothing
        from sparing.train.optim import velocities

        values = self.model_dump(include={"epochs", "steps", "batch", "prox"}, exclude_none=True)
        phase = Phase(**values, optimiser=self._optimiser())
        return Local((phase,), self.buffers, velocities if self.velocity == "kept" else nothing)

    def _optimiser(self) -> Optimiser:
        options = tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in self.options.items())
        return Optimiser(
            self.optimiser,
            self.lr,
            self.momentum,
            self.nesterov,
            self.weight_decay,
            self.clip,
            options,
            read_schedule(self.schedule, self.warmup),
        )


class PersonalizationSection(StudySection):
    """Which layers stay with the client; one list given, the rest is the other."""

    shared_layers: list[str] | None = None
    personalized_layers: list[str] | None = None

    def options(self) -> dict[str, list[str]]:
        """As the recipes call them."""
        named = {"layers": self.personalized_layers, "shared": self.shared_layers}
        return {key: names for key, names in named.items() if names is not None}


class AttackSection(StudySection):
    """Simulated attackers; see docs/kin/robust.md."""

    kind: Literal["none", "label-flip", "sign-flip", "scaled", "nan"] = "none"
    share: float = Field(default=0.2, gt=0, lt=1)  # of the clients that train
    scale: PositiveFloat = 10.0  # of what sign-flip and scaled send


class LinksSection(StudySection):
    """How fast clients' links and devices are; a word alone is the kind. See docs/fleet.md for the units."""

    kind: Literal["3g", "4g", "wifi", "fibre", "mixed"] | None = None
    up: PositiveFloat | None = None  # Mbit/s
    down: PositiveFloat | None = None
    speed: PositiveFloat | None = None  # samples a second
    spread: NonNegativeFloat = 0.0  # standard deviation of a rate's logarithm, between clients

    @model_validator(mode="before")
    @classmethod
    def by_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def one_meaning(self) -> "LinksSection":
        if self.kind is not None and (self.up is not None or self.down is not None):
            raise ValueError(f"fleet.links has kind {self.kind!r} and rates of its own; give kind, or up and down")
        if self.spread and all(x is None for x in (self.kind, self.up, self.down, self.speed)):
            raise ValueError(f"fleet.links.spread is {self.spread}, but there is no rate to spread; give up and down")
        return self


class FleetSection(StudySection):
    """Clients as they are; see docs/fleet.md for the two CSV files."""

    available: float = Field(default=1.0, gt=0, le=1)  # chance to be reachable in a round
    trace: str | None = None  # CSV: client, from, to
    dropout: float = Field(default=0.0, ge=0, lt=1)  # chance to vanish before the upload
    capacity: str | None = None  # CSV: client, and what its device declares
    links: LinksSection = LinksSection()  # where the file does not say
    latency: NonNegativeFloat = 0.0  # seconds, each way
    deadline: PositiveFloat | None = None  # seconds after which a round takes no more uploads
    attack: AttackSection = AttackSection()
    arrived: str | None = None  # a run folder: who was asked and who counted there, instead of a draw


class NetworkSection(StudySection):
    """Rounds over a network; a simulation has no use for it. See docs/network.md."""

    deadline: PositiveFloat | None = None  # seconds that a round waits for uploads; none: as long as it takes
    quorum: PositiveInt | PositiveFloat = 1.0  # uploads that a round needs: a count, or a share of `sample`
    retries: NonNegativeInt = 3  # deadlines more, where a round has too few uploads
    over: NonNegativeFloat = 0.0  # clients asked beyond `sample`, as a share of it; the first to arrive count
    resend: PositiveFloat = 30.0  # seconds after which an unanswered letter goes again, each time twice as long
    most_samples: PositiveInt | None = None  # of one client
    evaluate: Literal["server", "clients"] = "server"  # whose test samples are asked


class SecureSection(StudySection):
    """Secure aggregation: the server learns sums alone. `secure: true` is the section as it stands: docs/secure.md."""

    clients: int = Field(default=3, ge=3)  # honest ones in any sum, at least
    colluding: NonNegativeInt = 0  # clients that may tell the server all they know
    least: PositiveInt | PositiveFloat | None = None  # uploads that a sum needs: a count, or a share of the cohort
    degree: PositiveInt | None = None  # neighbours that a client masks towards; none: see docs/secure.md

    @field_validator("least")
    @classmethod
    def a_share(cls, value: int | float | None) -> int | float | None:
        if isinstance(value, float) and value > 1:
            raise ValueError(f"secure.least is {value}; a share lies between 0 and 1, a count is whole")
        return value


class EvaluateSection(StudySection):
    every: PositiveInt = 1  # rounds
    clients: PositiveInt = 500  # looked at, at most
    who: list[Literal["global", "before", "after", "new"]] = ["global", "before"]
    steps: PositiveInt = 10  # of local training for new clients
    set: Literal["test", "validation"] = "test"
    metrics: list[str] = []  # or my_file.py:function; the first is what tables rank by; none: the task's own

    @field_validator("metrics", mode="before")
    @classmethod
    def one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("metrics")
    @classmethod
    def known_names(cls, value: list[str]) -> list[str]:
        for one in value:
            if not is_code(one):
                try:
                    known_metric(one)
                except ConfigError as error:
                    raise ValueError(f"evaluate.metrics: {error}") from None
        return value

    @field_validator("who", mode="before")
    @classmethod
    def plain_words(cls, value: Any) -> Any:
        """`personalized` is what run folders call `before`."""
        return ["before" if one == "personalized" else one for one in value] if isinstance(value, list) else value


class PlanSection(StudySection):
    """How the work is laid out; "auto" is settled once, written down, and reused by resume. See docs/plan.md."""

    path: Literal["auto", "loop", "loop-fast", "stacked", "compiled", "implicit"] = "auto"
    chunk: PositiveInt | Literal["auto"] = "auto"
    threads: PositiveInt | Literal["auto"] = "auto"
    bank: Literal["auto", "memory", "host", "file"] = "auto"
    parcels: Literal["forgotten", "kept"] = "forgotten"  # kept as files, for `sparing wire`, by the debug engine
    memory: PositiveInt | str = "auto"  # bytes of client models and updates in flight, such as 500MB
    precision: Literal["float32", "tf32", "bf16"] = "float32"  # of local training; never chosen by itself
    graph: _BoolOrAuto = "auto"  # local training captured as a CUDA graph
    microbatch: PositiveInt | Literal["auto", "whole"] = "auto"  # samples of a batch that are computed at once
    recompute: _BoolOrAuto = "auto"  # activations within repeated blocks computed again for the gradient, not kept
    logits: Literal["auto", "whole", "chunked"] = "auto"  # of language models; chunked: formed a few tokens at a time

    @field_validator("memory")
    @classmethod
    def a_size(cls, value: int | str) -> int | str:
        try:
            fine = value == "auto" or bytes_of_text(value, "plan.memory") >= 1
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if not fine:
            raise ValueError(f"plan.memory is {value!r}, which holds nothing; write a size such as 500MB")
        return value


class Study(StudySection):
    """Everything a run depends on. Every key is optional."""

    task: TaskSection = TaskSection()
    method: list[Any] = ["fedavg"]
    personalization: PersonalizationSection = PersonalizationSection()
    local: LocalSection = LocalSection()
    rounds: PositiveInt = 20
    sample: PositiveInt | PositiveFloat = 0.5
    engine: Literal["vector", "debug", "network"] = "vector"  # network: written by `sparing serve`
    device: str = "auto"
    seed: int = Field(default=0, ge=0, lt=2**63)
    fleet: FleetSection = FleetSection()
    evaluate: EvaluateSection = EvaluateSection()
    network: NetworkSection = NetworkSection()
    secure: SecureSection | None = None  # or true
    plan: PlanSection = PlanSection()
    checkpoint: PositiveInt = 1  # rounds between checkpoints
    record: list[Literal["updates", "similarity"]] = []  # pictures for `sparing report` that cost extra training
    keep_secret: StrictBool = False  # what noise was drawn from, once the run has ended; then it can be repeated

    @model_validator(mode="before")
    @classmethod
    def secure_or_not(cls, values: Any) -> Any:
        """`secure: true` is the section as it stands."""
        found = values.get("secure") if isinstance(values, dict) else None
        if isinstance(found, bool):
            return values | {"secure": {} if found else None}
        if not isinstance(found, dict | SecureSection | None):
            raise ValueError(f"secure is {found!r}; set it to true or false, or to keys such as {{colluding: 1}}")
        return values

    def code(self) -> dict[str, CodeCall]:
        """What it names of code that is not ours, by its keys."""
        metrics = [CodeCall(one) for one in self.evaluate.metrics if is_code(one)]
        found = {f"task.{key}": call for key, call in self.task.code().items()}
        return found | {f"evaluate.metrics.{i}": one for i, one in enumerate(metrics)}

    def fingerprint(self) -> str:
        """What must not change between a run and its resumption. A key that is new since then changes nothing."""
        aside: Any = {"plan": {"graph"}, "keep_secret": True, "network": True}
        values = self.model_dump(exclude_defaults=True, exclude=aside)
        usual = {"microbatch": "whole", "recompute": False, "logits": "whole"}
        plan = {key: one for key, one in values.pop("plan", {}).items() if usual.get(key) != one}
        text = json.dumps(values | ({"plan": plan} if plan else {}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def study_from(values: dict[str, Any], where: str = "study") -> Study:
    """Validate plain values; every mistake becomes one sentence."""
    values = dict(values)
    if "method" in values:
        values["method"] = _method_at(values["method"], where)
    if isinstance(values.get("task"), str):
        values["task"] = {"data": values["task"]}
    try:
        study = Study.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {one_line(_validation_sentence(error), most=1000)}") from None
    if isinstance(study.sample, float) and study.sample > 1:
        raise ConfigError(f"{where}: sample is {study.sample}; a share lies between 0 and 1, a count is a whole number")
    return study


def _method_at(value: Any, where: str) -> list[Any]:
    try:
        return method_list(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def load_study(path: str | Path | None, overrides: Sequence[str] = (), without_sweep: bool = False) -> Study:
    """A YAML file (or none, for the defaults) with `key=value` overrides such as `local.lr=0.1`.

    A section `sweep` is refused, or with `without_sweep` left aside.
    """
    values = read_yaml(Path(path)) if path is not None else {}
    for item in overrides:
        apply_override(values, item)
    if without_sweep:
        values.pop("sweep", None)
    if "sweep" in values:
        raise ConfigError(f"{path} has a section sweep; try its settings with `sparing sweep {path}`")
    place_code(values, path)
    return study_from(values, str(path) if path is not None else "study")


def place_code(values: dict[str, Any], path: str | Path | None = None) -> None:
    """Find the files of code that these values name, beside the study file or under the current folder, in place."""
    folders = (*([] if path is None else [Path(path).parent]), Path())
    task, evaluate = values.get("task"), values.get("evaluate")
    if isinstance(evaluate, dict) and isinstance(evaluate.get("metrics"), str):
        evaluate["metrics"] = [evaluate["metrics"]]
    if isinstance(evaluate, dict) and isinstance(evaluate.get("metrics"), list):
        names = evaluate["metrics"]
        evaluate["metrics"] = [place_beside(x, folders) if isinstance(x, str) and is_code(x) else x for x in names]
    if not isinstance(task, dict):
        return
    for key, (reference, _) in code_in(task).items():
        found, entry = place_beside(reference, folders), task[key]
        task[key] = {found: entry[reference]} if isinstance(entry, dict) else found


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key may stand only once, and on, off, yes and no are words."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in known if first in "tTfF" or tag != "tag:yaml.org,2002:bool"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        counts = Counter(key for key in keys if isinstance(key, Hashable))
        twice = next((key for key, n in counts.items() if n > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice!r} stands twice; keep one")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no study file {str(path)!r}; check the path, or leave it out to use the defaults")
    try:
        values = _load_plain_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        text = str(error).replace('in "<unicode string>", ', "")
        raise ConfigError(f"{path} is not valid YAML: {one_line(text, most=400)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; a study is a mapping such as 'rounds: 20'")
    return values


_MOST_YAML_VALUES = 1_000_000
_DEEPEST_YAML = 50


def _load_plain_yaml(text: str) -> Any:
    """What a YAML text holds; YAMLError where aliases make more of it than was written, or values hold themselves."""
    try:
        held = yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    count, inner = 0, [(held, 0)]
    while inner:
        value, depth = inner.pop()
        count += 1
        if count > _MOST_YAML_VALUES or depth > _DEEPEST_YAML:
            raise yaml.YAMLError(
                f"it holds more than {_MOST_YAML_VALUES:,} values or nests them more than {_DEEPEST_YAML} deep"
            )
        if isinstance(value, dict | list | tuple | set):
            inner += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
    return held


def apply_override(values: dict[str, Any], item: str) -> None:
    """Apply `a.b=value` in place; the value is read as YAML."""
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"{item!r} is not an override; write key=value, such as local.lr=0.1")
    *parents, last = key.split(".")
    here = values
    for parent in parents:
        if not isinstance(here.get(parent), dict):
            word = here.get(parent) if parent == "task" else None  # task: mnist
            here[parent] = {"data": word} if isinstance(word, str) else {}
        here = here[parent]
    try:
        here[last] = float(text) if SCIENTIFIC_NUMBER.fullmatch(text) else _load_plain_yaml(text)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"the value in {item!r} is not valid YAML; quote it if it is text") from None


def method_list(value: Any) -> list[Any]:
    """`psfed+int8`, a list of names and {name: options}, or a mixture: as one list.

    >>> method_list(["psfed+topk", {"int8": {}}])
    ['psfed', 'topk', {'int8': {}}]
    """
    items = value if isinstance(value, list | tuple) else [value]
    out: list[Any] = []
    for item in items:
        out += [part.strip() for part in item.split("+")] if isinstance(item, str) else [item]
    if not out or "" in out:
        raise ConfigError(f"method is {value!r}; name at least one, such as fedavg or psfed+int8")
    out = [_spell_out(item) for item in out]
    for item in out:
        name_and_options("method", item)
    return out


def _spell_out(item: Any) -> Any:
    """An entry with one value instead of options.

    >>> _spell_out({"budget": "20kB"})
    {'budget': {'bytes': '20kB'}}
    """
    name, value = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else ("", None)
    short = name in _SHORT_OPTIONS and isinstance(value, int | float | str) and not isinstance(value, bool)
    return {name: {_SHORT_OPTIONS[name]: value}} if short else item


def _validation_sentence(error: ValidationError) -> str:
    """The first mistake pydantic found, in words."""
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        *parents, last = [str(part) for part in first["loc"]]
        return f"unknown key {'.'.join([*parents, last])!r}; {nearest_name(last, _section_at(parents).model_fields)}"
    where, seen = _key_path(first["loc"]), first["input"]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        return f"{where} is {seen!r}; it has keys of its own, such as {_example_key(first['loc'])}"
    what = first["msg"][:1].lower() + first["msg"][1:]
    return f"{where}: {what}" if isinstance(seen, dict) else f"{where}: {what} (seen: {seen!r})"


def _example_key(location: Sequence[int | str]) -> str:
    names = list(_section_at([str(part) for part in location]).model_fields)
    return f"{{{names[0]}: ...}}"


def _key_path(location: Sequence[int | str]) -> str:
    """The part of pydantic's location that names keys; the rest names branches of a union."""
    names: list[str] = []
    for part in location:
        if part not in _section_at(names).model_fields:
            break
        names.append(str(part))
    return ".".join(names)


def _section_at(parents: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] = Study
    for parent in parents:
        kind = section.model_fields[parent].annotation
        kinds = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
        section = kinds[0] if kinds else StudySection
    return section
