"""What a finished run has trained beside a frozen network, as files that other libraries load."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.core.compose import compose, remake_model
from sparing.core.context import context
from sparing.core.errors import CheckpointError, ConfigError
from sparing.core.method import Method
from sparing.core.tree import Layout, layout_of, rest_of, tree_of, tree_sha256
from sparing.data.options import name_and_options
from sparing.parts.size.lora.adapted import B
from sparing.parts.size.lora.peft_form import merged_tensors, peft_form
from sparing.parts.size.lora.ranks import adapter_layers
from sparing.runs.files.checkpoint import load_checkpoint
from sparing.runs.files.run_folder import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    SUMMARY_FILE,
    read_config,
    refuse_altered_files,
    saved_round,
    server_from_tensors,
)
from sparing.runs.own_code import CODE_FOLDER, trust_code
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import task_from_study
from sparing.runs.study import OWN_TASK, Study, study_from
from sparing.storage.atomic import os_errors_as_checkpoint_error, write_atomic, write_json
from sparing.tasks.task import Task

ADAPTER_FILE, ADAPTER_CONFIG_FILE, MERGED_FILE = "adapter_model.safetensors", "adapter_config.json", "model.safetensors"


class _Trained(NamedTuple):
    network: nn.Module
    moved: frozenset[str]  # buffers that are not as they were before training


def export(
    run: str | Path,
    *,
    peft: str | Path | None = None,
    merged: str | Path | None = None,
    rank: int | None = None,
    base: Task | nn.Module | None = None,
    trust: bool = False,
) -> list[Path]:
    """Write the global adapter of a finished run: for peft, or merged into its base. The files written.

    `peft`: a folder for `adapter_model.safetensors` and `adapter_config.json`. `merged`: one for `model.safetensors`,
    the state of the network without adapters. `rank`: as clients of that rank get it. `base`: the task, or the network
    before training, where the study does not name it. `trust`: run the code that came with the folder.
    """
    outs = [Path(out) for out in (peft, merged) if out is not None]
    if not outs:
        raise ConfigError("export has nowhere to write; name a folder for peft, for merged, or for each")
    for out in outs:
        _refuse_full_folder(out)
    run = Path(run)
    study = _finished_study(run)
    options = _lora_options(study, run)
    if trust:
        trust_code(study, run / CODE_FOLDER)
    trained = _trained_network(run, study, _base_network(run, study, base), rank)
    made: dict[Path, Any] = {}
    if peft is not None:
        form = peft_form(trained.network, trained.moved, options.get("scale") == "root")
        made |= {Path(peft, ADAPTER_FILE): form.tensors, Path(peft, ADAPTER_CONFIG_FILE): form.config}
    if merged is not None:
        made[Path(merged, MERGED_FILE)] = merged_tensors(trained.network)
    for path, value in made.items():
        _write_file(path, value)
    return list(made)


def _write_file(path: Path, value: dict[str, Any]) -> None:
    from safetensors.torch import save

    with os_errors_as_checkpoint_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            write_json(path, value)
        else:
            write_atomic(path, save(value, {"format": "pt"}))


def _refuse_full_folder(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise ConfigError(f"{out} {what}, and an export replaces nothing; name a new folder, or empty that one")


def _finished_study(run: Path) -> Study:
    study = study_from(read_config(run), str(run / CONFIG_FILE))
    if not (run / SUMMARY_FILE).exists():
        raise ConfigError(
            f"{run} is not finished: {saved_round(run)} of {study.rounds} rounds; finish it with `sparing resume {run}`"
        )
    refuse_altered_files(run, study.fingerprint())
    return study


def _lora_options(study: Study, run: Path) -> dict[str, Any]:
    entries = dict(name_and_options("method", entry) for entry in study.method)
    if "lora" not in entries:
        raise ConfigError(
            f"{run} has no adapters: its method is {' + '.join(entries)}; export a run whose method has lora in it"
        )
    return entries["lora"]


def _base_network(run: Path, study: Study, base: Task | nn.Module | None) -> nn.Module:
    """As it was before training."""
    if isinstance(base, nn.Module):
        return copy.deepcopy(base)
    own = name_and_options("data", study.task.data)[0] == OWN_TASK
    if base is None and (own or study.engine == "network"):
        whose = "was run on a task of your own" if own else "was served to clients elsewhere"
        raise ConfigError(
            f"{run} {whose}, and does not say how its network is built; pass it: "
            f"sparing.export({str(run)!r}, base=..., peft=...)"
        )
    return (base or task_from_study(study, run / CODE_FOLDER)).build(study.seed)


def _trained_network(run: Path, study: Study, base: nn.Module, rank: int | None) -> _Trained:
    """The network with the global model in it, or what clients of this rank get."""
    made, static = recipes_from_entries(study.method, study.personalization.options()), study.local.buffers == "static"
    network = remake_model(base, made, static, study.seed).cpu()
    layout = layout_of(network, static)
    first, rest = tree_of(network, layout), rest_of(network, layout)
    tensors, meta = load_checkpoint(run / CHECKPOINT_FILE)
    if meta["identity"]["model"] != tree_sha256(first | rest.fixed):
        raise CheckpointError(
            f"{run} was trained on another network than this one, whose weights differ; export it with the code, the "
            "files and the versions that it began with"
        )
    method = compose(layout, *made, local=study.local.local(), arrives=True)
    _refuse_private(run, layout, method)
    server = server_from_tensors(tensors)
    moved = frozenset(name for name in layout.buffers if not torch.equal(server.model[name], first[name]))
    size, model = _size_of_rank(layout, method, rank), server.model
    if size is not None and method.fit is not None:
        ctx = context(study.seed, meta["round"], study.rounds, [0], [1], 1, 1)
        network = method.fit.module(network, size)
        model = method.fit.resize.shrink(server.fit, model, size, ctx)
    known = layout.shapes.keys() | rest.fixed.keys()
    network.load_state_dict(_state(rest.complete({name: x for name, x in model.items() if name in known})))
    return _Trained(network.eval(), moved)


def _state(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x[0] for name, x in tree.items()}


def _refuse_private(run: Path, layout: Layout, method: Method) -> None:
    private = next((name for name in layout.params if name in method.share.private), None)
    if private:
        raise ConfigError(
            f"{private!r} stays with each client of {run}, so there is no global one to write; train without the "
            "recipe that keeps it there"
        )


def _size_of_rank(layout: Layout, method: Method, rank: int | None) -> int | None:
    """Which of the method's sizes has adapters of this rank; None for the global model."""
    if rank is None:
        return None
    layouts = method.fit.layouts if method.fit else (layout,)
    one = f"{adapter_layers(layout)[0]}.{B}"
    offered = [each.shapes[one][1] for each in layouts]
    if rank not in offered or rank == 0:
        usual = ", ".join(str(one) for one in offered if one)
        raise ConfigError(f"rank is {rank}, and clients of this run have {usual}; choose one of these, or none")
    return offered.index(rank)
