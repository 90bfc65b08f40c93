"""What the author of a backend says about it, and the cases that follow from that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import attrs
import pytest
import torch

from kvist.attention.base import AttentionBackend
from kvist.spec import Layer
from kvist.testing.attention.case import Case, total_tokens
from kvist.testing.attention.driver import Driver
from kvist.testing.attention.inputs import over_tensors, token_fields
from kvist.testing.outcomes import NOT_RUN_HERE, not_run_here


class Author:
    """Fill in ``backend``, ``cases``, ``inputs`` and ``reference``; the others have defaults.

    backend: the class under test.
    cases: specs to test it with, and their inputs' dtypes. At least one has two layers with equal streams.
    devices: torch device types; one that is not on this machine is skipped, with the reason.
    features: the optional parts of the family that the backend declares, as in its record. Cases that need others
        count for nothing but a remark should they work.
    constants: names of tensors in the inputs that are not per token, such as learned parameters.
    triton: is it made of Triton kernels? On a CPU they run in Triton's interpreter, which the environment variable
        ``TRITON_INTERPRET=1`` has to switch on before triton is imported; on a GPU they run compiled, without it.
    """

    backend: ClassVar[type[AttentionBackend]]
    cases: ClassVar[Sequence[Case]]
    devices: ClassVar[Sequence[str]] = ("cpu",)
    features: ClassVar[frozenset[str]] = frozenset()
    constants: ClassVar[frozenset[str]] = frozenset()
    triton: ClassVar[bool] = False

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> Any:
        """Inputs of one whole sequence, in the family's own frozen attrs class, on the CPU, in ``case.dtype``.

        Tensors have the tokens in axis 0, but those named in ``constants``; the kit cuts them there, joins pieces of
        several sequences, and moves all of them to the case's device. Values of about one suit the tolerances.
        Constants, learned parameters, must not depend on the sequence: draw them from a generator of your own.
        """
        raise NotImplementedError(f"{type(self).__name__}.inputs: draw a sequence's inputs from the generator")

    def reference(self, case: Case, layer: Layer, inputs: Any) -> torch.Tensor:
        """The outputs of one whole sequence, in float64, computed densely: no pages, no steps, no code of the backend.

        ``inputs`` are as :meth:`inputs` made them, with all floats in float64. Where rows are stored in a smaller dtype
        than the inputs', round them here as the backend does. Returns ``[token_count, ...]``.
        """
        raise NotImplementedError(f"{type(self).__name__}.reference: compute the outputs densely, in float64")

    # For the kit.

    def dense(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> Any:
        """``inputs`` on the case's device."""
        return over_tensors(
            self.inputs(case, layer, token_count, generator), lambda tensor: tensor.to(case.device, copy=True)
        )

    def names(self, inputs: Any, token_count: int) -> list[str]:
        """The per-token fields of ``inputs``."""
        return token_fields(inputs, self.constants, token_count)

    def driver(self, case: Case, *, requests: int = 2, **options: Any) -> Driver:
        """A new cache with room for ``requests`` sequences of the case's length."""
        self._require_interpreter(case)
        return Driver(self, case, tokens=requests * total_tokens(case.spec), **options)

    def _require_interpreter(self, case: Case) -> None:
        if self.triton and case.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            not_run_here(
                "Triton kernels run on a CPU in Triton's interpreter only; put os.environ['TRITON_INTERPRET'] = '1' "
                "into the conftest.py, above every import of triton"
            )

    @classmethod
    def declared(cls) -> list[Any]:
        """Every case on every device, as parameters."""
        return [each for each in cls.parameters() if each.values[0].features <= cls.features]

    @classmethod
    def parameters(cls) -> list[Any]:
        """As ``declared``, with the cases whose features are not."""
        found = []
        for case in getattr(cls, "cases", ()):
            for device in cls.devices:
                reason = f"{NOT_RUN_HERE}: there is no {device!r} device on this machine"
                marks = [] if _is_here(device) else [pytest.mark.skip(reason=reason)]
                name = case.name if len(cls.devices) == 1 else f"{case.name}-{device}"
                found.append(pytest.param(attrs.evolve(case, device=device), marks=marks, id=name))
        return found

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per case and device."""
        if "any_case" in metafunc.fixturenames:
            metafunc.parametrize("any_case", self.parameters())
        elif "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.declared())


@cache
def _is_here(device: str) -> bool:
    """Can this machine, and this build of torch, use the device?"""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):  # AssertionError: a build without it
        return False
    return True
