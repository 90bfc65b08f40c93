"""A model whose attention, and some of whose modules, are others for a while: what adapters of all families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvist.errors import SpecError
from kvist_transformers.attention import NAME, register


class Attachment:
    """Gives ``model``, one of transformers, Kvist's attention function until :meth:`detach`.

    prefix: in front of messages. modules: pairs of a module of the model and what takes the place of its ``forward``, a
        function of the module and of forward's arguments. On the instance: its class, and every other model, keeps its
        own.
    """

    def __init__(self, model: Any, prefix: str = "", modules: Iterable[tuple[Any, Callable[..., Any]]] = ()) -> None:
        register()
        self._model, self._prefix = model, prefix
        self._previous = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        self._modules = []
        for module, forward in modules:
            module.forward = forward.__get__(module)
            self._modules.append(module)

    def require(self) -> None:
        """Raises SpecError when another call switched the attention off."""
        if self._model.config._attn_implementation != NAME:
            raise SpecError(
                f"{self._prefix}the attention implementation is {self._model.config._attn_implementation!r}",
                hint="something switched it while the engine was attached; do not use the model in between",
            )

    def detach(self) -> None:
        """Give the model its previous attention, and its modules, back. Idempotent."""
        if self._model.config._attn_implementation == NAME:
            self._model.set_attn_implementation(self._previous)
        for module in self._modules:
            module.__dict__.pop("forward", None)


def require_unattached(model: Any, what: str) -> None:
    """Raises SpecError, naming ``what``, for a model that another engine has."""
    if model.config._attn_implementation == NAME:
        raise SpecError(f"{what} is attached already", hint="close the engine that it is attached to")


def require_eval(model: Any, what: str) -> None:
    """Raises SpecError, naming ``what``, for a model that is being trained."""
    if model.training:
        raise SpecError(f"{what} is in training mode", hint="call model.eval() first")


def require_one_device(model: Any, what: str) -> None:
    """Raises SpecError, naming ``what``, for a model that lies on several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise SpecError(
            f"{what}: its parameters are on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}",
            hint="load it onto one device, without device_map",
        )
