"""A model of Hugging Face from a folder of this machine: its config.json, and its weights where it has some.

Nothing is downloaded, no code of the folder runs, and of weights only safetensors are read. What is built is decided by
the task: a causal language model where there is a target at every place, a classifier where there is one for each
sample.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sparing.core.errors import ConfigError
from sparing.data.files.locations import find_user_folder
from sparing.data.files.offline_library import offline_transformers
from sparing.data.files.unpacking import one_line, read_json
from sparing.models.registry import register_model

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_IMAGE_AXES = 3


@register_model("hf:FOLDER")
def _hugging_face_model(
    folder: str,
    shape: tuple[int, ...],
    classes: int,
    dtype: Literal["float32", "bf16"] = "float32",
    vocabulary: int | None = None,
    per_token: bool | None = None,
) -> nn.Module:
    """Weights that the folder lacks, a classifier's head say, are drawn from the seed, as all are where it has none."""
    path = find_user_folder("hf", folder)
    kind = _kind_of_model(path, shape, per_token)
    options: dict[str, Any] = {} if kind == "AutoModelForCausalLM" else {"num_labels": classes}
    with offline_transformers(f"model hf:{folder}", ConfigError) as library, _as_sentence(f"hf:{folder}"):
        config = library.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **options)
        config.use_cache = False  # of keys and values, for writing text
        if kind == "AutoModelForSequenceClassification" and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # what sequences are filled up with
        make = getattr(library, kind)
        if _has_weights(path):
            model, found = make.from_pretrained(
                path,
                config=config,
                dtype=_DTYPES[dtype],
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # of a head for other classes; else refused below
                output_loading_info=True,
            )
            _refuse_other_weights(path, model, found["missing_keys"], found["mismatched_keys"])
        else:
            model = make.from_config(config, dtype=_DTYPES[dtype], trust_remote_code=False)
    if kind == "AutoModelForCausalLM":
        _refuse_many_tokens(folder, model, max(classes, vocabulary or 0))
    elif vocabulary is not None:
        _refuse_many_tokens(folder, model, vocabulary)
    return model.train()


@contextmanager
def _as_sentence(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # whatever a folder of other people's making may cause
        raise ConfigError(
            f"model {name} cannot be built ({type(error).__name__}: {one_line(error, most=300)}): give a folder with "
            "the config.json, and safetensors if any, of a model that transformers itself has"
        ) from None


def _kind_of_model(path: Path, shape: tuple[int, ...], per_token: bool | None) -> str:
    """The class of transformers: by the task, or where that says nothing, as the folder's config has it."""
    fix = "give a folder that save_pretrained of transformers wrote"
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no config.json: {fix}")
    config = read_json(path / "config.json", f"{path / 'config.json'} is no json: {fix}")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path / 'config.json'} names no model_type: give the config of a model of transformers")
    _refuse_other_code(config, path / "config.json")
    if len(shape) == _IMAGE_AXES:
        return "AutoModelForImageClassification"
    if per_token is None:
        named = config.get("architectures")
        per_token = any(str(one).endswith(("ForCausalLM", "LMHeadModel")) for one in (named or []))
    return "AutoModelForCausalLM" if per_token else "AutoModelForSequenceClassification"


def _refuse_other_code(config: dict[str, Any], file: Path) -> None:
    """transformers would fetch kernels that a config names, and run them."""
    for key, value in config.items():
        if isinstance(value, dict):
            _refuse_other_code(value, file)
        elif key.endswith("_implementation") and not (value is None or str(value).isidentifier()):
            raise ConfigError(
                f"{file} names code elsewhere, {key}: {one_line(value, most=40)}, which is not run: take the line out"
            )
    if config.get("quantization_config"):
        raise ConfigError(f"{file} is of a quantised model, which cannot be trained: give one in float32 or bf16")


def _has_weights(path: Path) -> bool:
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{path} holds an adapter of peft, which is not read: merge it, or give the folder of its base"
        )
    for file in sorted(path.glob("*.safetensors.index.json")):
        index = read_json(file, f"{file} is no json: save the model anew with save_pretrained")
        parts = index.get("weight_map") if isinstance(index, dict) else None
        names = [str(one) for one in parts.values()] if isinstance(parts, dict) else [""]
        odd = next((one for one in names if one != Path(one).name or not one.endswith(".safetensors")), None)
        if odd is not None:
            raise ConfigError(
                f"{file} names {one_line(odd, most=40)!r}, which is no safetensors file beside it: save the model anew "
                "with save_pretrained"
            )
    if any(path.glob("*.safetensors")):
        return True
    other = sorted(file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern))
    if other:
        raise ConfigError(f"{path} holds its weights in {other[0]}, which is not read: save them as safetensors")
    return False


def _refuse_other_weights(path: Path, model: Any, lacking: Iterable[str], odd: Iterable[Any]) -> None:
    """A head may be new, or for other classes; within the network sizes are as asked, and most are there."""
    body = f"{model.base_model_prefix}."
    for name, there, wanted in odd:
        if name.startswith(body) or model.get_output_embeddings() is not None:
            raise ConfigError(
                f"{name} is {tuple(there)} in the safetensors of {path}, but config.json asks for {tuple(wanted)}: put "
                "the weights beside the config they were saved with"
            )
    sizes = {name: x.numel() for name, x in model.named_parameters()}
    whole, new = sum(sizes.values()), sum(sizes.get(name, 0) for name in lacking if name.startswith(body))
    if 2 * new > whole:
        raise ConfigError(
            f"the safetensors of {path} hold {whole - new:,} of the {whole:,} weights that config.json asks for: put "
            "the weights beside the config they were saved with"
        )


def _refuse_many_tokens(folder: str, model: Any, vocabulary: int) -> None:
    """Tokens that the model has no row for would be an error in the middle of a round, or on a GPU a crash."""
    table = model.get_input_embeddings()
    room = getattr(table, "num_embeddings", None)
    if isinstance(room, int) and vocabulary > room:
        raise ConfigError(
            f"the tokeniser does not fit the model: the data is made of {vocabulary:,} tokens, but hf:{folder} has "
            f"room for {room:,}; name the model's own folder as the data's tokenizer, or another model"
        )
