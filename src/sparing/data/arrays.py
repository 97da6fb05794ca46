"""Arrays as people bring them, as tensors to train on."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import DataError

_FLOAT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGER_TYPES = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
)
_GIVE_NUMBERS = "give an array of floats or integers"


def to_tensor(values: Any, what: str = "the array", pixels: bool = False) -> Tensor:
    """Numbers as torch trains on them: tensors keep their float type, other floats become float32, integers int64.

    `what` names them in a refusal. `pixels`: uint8 stays, to be made floats batch by batch.

    >>> to_tensor([[0.5], [1.5]]).dtype, to_tensor([True, False])
    (torch.float32, tensor([1, 0]))
    """
    if isinstance(values, list | tuple) and values and all(isinstance(x, Tensor) for x in values):
        values = _stack_tensors(values, what)
    x = values.detach() if isinstance(values, Tensor) else _tensor_from_array(values, what)
    _refuse_unusual_tensor(x, what)
    if x.dtype in _FLOAT_TYPES:
        return x
    if x.dtype == torch.uint64:
        _refuse_large_integers(x, what)
    return x if pixels and x.dtype == torch.uint8 else x.long()


def _stack_tensors(values: Any, what: str) -> Tensor:
    try:
        return torch.stack([x.detach() for x in values])
    except RuntimeError as error:
        raise _ragged_array_error(what, error) from None


def _tensor_from_array(values: Any, what: str) -> Tensor:
    """Whatever NumPy reads, in numbers that torch has."""
    if hasattr(values, "toarray"):
        raise DataError(f"{what} is sparse ({type(values).__name__}): give it dense, as its toarray() does")
    if np.ma.is_masked(values):
        raise DataError(f"{what} is a masked array, and masked values are no numbers: fill them, as filled(0) does")
    try:
        array = np.array(values)  # a copy: torch warns about arrays it may not write to
    except (TypeError, ValueError, RuntimeError) as error:
        raise _ragged_array_error(what, error) from None
    if array.dtype.kind not in "biufc":
        raise DataError(f"{what} holds {_describe_contents(array)}, which torch has no number for: {_GIVE_NUMBERS}")
    if array.dtype.kind == "f":
        array = array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(array).float()
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _describe_contents(array: np.ndarray) -> str:
    """
    >>> _describe_contents(np.array(["cat", "dog"])), _describe_contents(np.array([1, None]))
    ("'cat' (str)", 'None (NoneType)')
    """
    if array.dtype.kind == "O":
        odd = [x for x in array.flat if not isinstance(x, int | float)] or list(array.flat[:1])
        value = odd[0]
    else:
        value = array.flat[0].item() if array.size and array.dtype.kind != "V" else array.dtype
    said = repr(value)
    return f"{said if len(said) <= 40 else said[:37] + '...'} ({type(value).__name__})"


def _ragged_array_error(what: str, error: Exception) -> DataError:
    said = str(error).strip().splitlines()[0].rstrip(".")
    return DataError(f"{what} is no array of equally long rows ({said}): cut or pad its samples to one shape")


def _refuse_unusual_tensor(x: Tensor, what: str) -> None:
    """Tensors that hold no plain real numbers."""
    fix = None
    if x.is_nested:
        fix = "is a nested tensor: pad its samples to one shape"
    elif x.layout != torch.strided:
        fix = f"is sparse ({str(x.layout).removeprefix('torch.')}): give it dense, as its to_dense() does"
    elif x.is_meta:
        fix = "is on the meta device, where there are no values: give it on the CPU"
    elif x.is_quantized:
        fix = f"is quantised ({dtype_name(x)}): give it in floats, as its dequantize() does"
    elif x.is_complex():
        fix = (
            f"is of type {dtype_name(x)}, and complex numbers are not trained on: "
            "give real and imaginary parts as real ones"
        )
    elif x.dtype not in (*_FLOAT_TYPES, *_INTEGER_TYPES, torch.uint64):
        fix = f"is of type {dtype_name(x)}: give it as float32"
    if fix is not None:
        raise DataError(f"{what} {fix}")


def _refuse_large_integers(x: Tensor, what: str) -> None:
    if bool((x.view(torch.int64) < 0).any()):
        raise DataError(f"{what} holds whole numbers from 2^63 on, which int64 has not: {_GIVE_NUMBERS} below that")


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
