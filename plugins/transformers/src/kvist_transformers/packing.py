"""Linear layers of a bfloat16 model on a C kernel that reads packed weights: what a step of few tokens waits for."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvist.native import KernelUnavailableError, first_variant

_SOURCE = Path(__file__).with_name("linear.c")
#: What the kernel takes outputs and inputs by.
_OUTPUTS, _INPUTS = 16, 8


class _Arguments(ctypes.Structure):
    """Mirrors ``arguments`` in linear.c, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("input_row", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
    )


class PackedLinears:
    """The linear layers of ``model`` use packed copies of their weights until :meth:`detach`.

    Packed are layers of exactly the class ``torch.nn.Linear`` in bfloat16 on a CPU whose outputs are a multiple of 16
    and whose inputs one of 8; the copies take as many bytes again, and follow no later change of the weights. Sums are
    float32, as torch's; they are added in another order. Where the kernel cannot be compiled, or the processor has no
    AVX512_BF16, nothing is packed and one warning says why.
    """

    def __init__(self, model: Any) -> None:
        self._layers: list[_PackedLinear] = []
        modules = [module for module in model.modules() if _fits(module)]
        if not modules:
            warnings.warn("no weights were packed: the model has no linear layers in bfloat16 on a CPU", stacklevel=2)
            return
        try:
            kernel = _load_kernel()
        except KernelUnavailableError as error:
            warnings.warn(f"no weights were packed, which is slower: {error.message}", stacklevel=2)
            return
        scratch = _Scratch()
        self._layers = [_PackedLinear(module, kernel, scratch) for module in modules]

    @property
    def count(self) -> int:
        """Layers that are packed."""
        return len(self._layers)

    def detach(self) -> None:
        """Give the layers their own forward back, and the copies up. Idempotent."""
        for layer in self._layers:
            layer.detach()
        self._layers = []


class _Scratch:
    """Memory for the rows of a call, shared by all layers; it only grows."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int32)

    def take(self, words: int) -> int:
        if self._memory.numel() < words:
            self._memory = torch.empty(words + words // 2, dtype=torch.int32)
        return self._memory.data_ptr()


class _PackedLinear:
    def __init__(self, module: torch.nn.Linear, kernel: ctypes.CDLL, scratch: _Scratch) -> None:
        outputs, inputs = module.weight.shape
        tiles = module.weight.detach().view(outputs // _OUTPUTS, _OUTPUTS, inputs // 2, 2)
        # The kernel points into the copy and the bias; they live as long as this.
        self._packed = tiles.transpose(1, 2).contiguous()
        self._bias = None if module.bias is None else module.bias.detach().contiguous()
        self._arguments = _Arguments(
            weight=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            outputs=outputs,
            inputs=inputs,
        )
        self._address = ctypes.byref(self._arguments)
        self._run = kernel.kvist_linear
        self._scratch = scratch
        self._module = module
        module.forward = self._forward  # type: ignore[method-assign]

    def detach(self) -> None:
        self._module.__dict__.pop("forward", None)

    def _forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch.nn.Linear calls it
        module, arguments = self._module, self._arguments
        if input.dtype is not torch.bfloat16 or torch.is_grad_enabled():
            return F.linear(input, module.weight, module.bias)
        rows = input.reshape(-1, arguments.inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        count = rows.shape[0]
        output = torch.empty(*input.shape[:-1], arguments.outputs, dtype=torch.bfloat16)
        arguments.input, arguments.output = rows.data_ptr(), output.data_ptr()
        arguments.rows, arguments.input_row = count, rows.stride(0)
        arguments.scratch = self._scratch.take(count * arguments.inputs // 2)
        arguments.threads = torch.get_num_threads()
        self._run(self._address)
        return output


def _fits(module: Any) -> bool:
    if type(module) is not torch.nn.Linear or "forward" in module.__dict__:
        return False
    weight = module.weight
    fits = weight.shape[0] % _OUTPUTS == 0 and weight.shape[1] % _INPUTS == 0 and weight.is_contiguous()
    return fits and weight.dtype is torch.bfloat16 and weight.device.type == "cpu"


@functools.cache
def _load_kernel() -> ctypes.CDLL:
    return first_variant(_SOURCE, _open)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.kvist_linear.argtypes, library.kvist_linear.restype = [ctypes.c_void_p], None
    library.kvist_linear_bytes.restype = ctypes.c_int64
    expected, found = ctypes.sizeof(_Arguments), library.kvist_linear_bytes()
    if expected != found:
        raise KernelUnavailableError(f"{path} takes arguments of {found} bytes, expected {expected}")
    return library
