"""Plugins with one fault of packaging each: folders with a distribution in it, as ``pip install`` leaves them.

``{mine}`` in a name or text is the plugin without a fault. Every mutant is that one with a piece of it replaced.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.mutants.base import Mutant

from kvist.testing.packaging import PluginTests

#: Every file of a good plugin ``sound``; what is replaced below occurs exactly once in its file.
FILES = {
    "kvist_sound-1.0.dist-info/METADATA": """\
Metadata-Version: 2.4
Name: kvist-sound
Version: 1.0
Requires-Dist: kvist<1,>=0.1
Requires-Dist: torch>=2.8
""",
    "kvist_sound-1.0.dist-info/entry_points.txt": "[kvist]\nsound = kvist_sound.plugin\n",
    "kvist_sound/__init__.py": '"""A good plugin."""\n',
    "kvist_sound/plugin.py": """\
from kvist.hookspecs import hookimpl
from kvist.records import AttentionBackendInfo, CacheManagerInfo

KVIST_SPEC = (1, 0)


@hookimpl
def kvist_cache_managers():
    return [
        CacheManagerInfo(
            name="sound",
            model_types=("sound",),
            spec_factory="kvist_sound.spec:cache_spec",
            adapters={"engine": "kvist_sound.spec:adapt"},
        )
    ]


@hookimpl
def kvist_attention_backends():
    backend = AttentionBackendInfo(
        name="sound-torch",
        factory="kvist_sound.backend:Backend",
        devices=("cpu",),
        dtypes=("float32",),
        families=("sound",),
    )
    return [backend]
""",
    "kvist_sound/spec.py": """\
from kvist.errors import SpecError
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream


def cache_spec(config, *, block_tokens, dtype):
    width = config.get("width")
    if not isinstance(width, int) or width < 1:
        raise SpecError(f"sound: width={width!r} must be a positive int", hint="give the elements of a row")
    row = RowFormat((width,), dtype or "float32")
    return CacheSpec((Layer(0, (Stream("k", row, History()),)),), block_tokens, "")


def adapt(model, spec):
    return model
""",
    "kvist_sound/backend.py": """\
from kvist.attention.base import AttentionBackend
from kvist.layout import RowMajor


class Backend(AttentionBackend):
    @classmethod
    def page_layout(cls, spec):
        return RowMajor()

    def __init__(self, context):
        self.memory = context.memory

    def begin(self, step):
        self.step = step

    def forward(self, layer_id, inputs):
        return inputs
""",
}

METADATA, POINTS, PACKAGE, PLUGIN, SPEC, BACKEND = FILES

#: Something heavy that costs the tests nothing.
FRAMEWORK = {"triton/__init__.py": ""}
#: A second distribution that offers the same entry point.
TWIN = {
    "kvist_twin-2.0.dist-info/METADATA": "Metadata-Version: 2.4\nName: kvist-twin\nVersion: 2.0\n",
    "kvist_twin-2.0.dist-info/entry_points.txt": FILES[POINTS],
}
#: A second distribution that has the name of a record.
NEIGHBOUR = {
    "kvist_near-1.0.dist-info/METADATA": FILES[METADATA].replace("kvist-sound", "kvist-near"),
    "kvist_near-1.0.dist-info/entry_points.txt": "[kvist]\nnear = near_plugin\n",
    "near_plugin.py": FILES[PLUGIN].partition("@hookimpl\ndef kvist_attention")[0].replace('("sound",)', '("near",)'),
}


def sound() -> dict[str, str]:
    """The good plugin."""
    return dict(FILES)


def changed(*edits: tuple[str, str, str], **more: dict[str, str]) -> dict[str, str]:
    """The good plugin with texts replaced, each of which occurs once, and with more files."""
    files = dict(FILES)
    for file, old, new in edits:
        assert files[file].count(old) == 1, f"{old!r} occurs {files[file].count(old)} times in {file}"
        files[file] = files[file].replace(old, new)
    for extra in more.values():
        files |= extra
    return files


@contextmanager
def suite(files: dict[str, str]) -> Iterator[type[PluginTests]]:
    """The kit's tests of a plugin with these files, as its author would fill them in."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

        class Sound(PluginTests):
            name = "sound"
            folders = (Path(folder),)

            def configs(self):
                return [{"model_type": "sound", "width": 8}]

            def bad_configs(self):
                return [
                    (
                        {"model_type": "sound", "width": 0},
                        "sound: width=0 must be a positive int\nhint: give the elements of a row",
                    )
                ]

        yield Sound


#: A package in place of the module that was installed.
HIDDEN = {
    "kvist_sound-1.0.dist-info/RECORD": "kvist_sound/plugin.py,,\n",
    "kvist_sound/plugin/__init__.py": FILES[PLUGIN],
}

HOOK = "def kvist_attention_backends():\n"

#: name of the mutant, clause, edits, more files
_FAULTS: tuple[tuple[str, str, tuple[tuple[str, str, str], ...], dict[str, str]], ...] = (
    ("the group of the entry point is misspelt", "PL-01", ((POINTS, "[kvist]", "[kvists]"),), {}),
    ("another distribution has the same entry point", "PL-01", (), TWIN),
    ("the entry point names a module that is not shipped", "PL-01", ((POINTS, "sound.plugin", "sound.plugins"),), {}),
    ("its module is hidden by a package", "PL-01", (), HIDDEN),
    ("metadata without a version", "PL-01", ((METADATA, "Version: 1.0\n", ""),), {}),
    ("does not require kvist", "PL-02", ((METADATA, "Requires-Dist: kvist<1,>=0.1\n", ""),), {}),
    ("has no upper bound", "PL-02", ((METADATA, "kvist<1,>=0.1", "kvist>=0.1"),), {}),
    ("has no lower bound", "PL-02", ((METADATA, "kvist<1,>=0.1", "kvist<1"),), {}),
    ("requires kvist for an extra only", "PL-02", ((METADATA, ">=0.1", '>=0.1; extra == "all"'),), {}),
    ("was written for a later core", "PL-02", ((METADATA, "kvist<1,>=0.1", "kvist<999,>=998"),), {}),
    ("computes its hook version", "PL-03", ((PLUGIN, "(1, 0)", "tuple([1, 0])"),), {}),
    ("has the hook version of a later major", "PL-03", ((PLUGIN, "(1, 0)", "(2, 0)"),), {}),
    ("imports a framework in the entry module", "PL-04", ((PLUGIN, "\nKVIST", "import triton\n\nKVIST"),), FRAMEWORK),
    (
        "imports a framework in the package",
        "PL-04",
        ((PACKAGE, "plugin.", 'plugin."""\nimport triton\n"""'),),
        FRAMEWORK,
    ),
    ("imports a framework in a hook", "PL-04", ((PLUGIN, HOOK, HOOK + "    import triton\n"),), FRAMEWORK),
    ("prints when it is imported", "PL-05", ((PLUGIN, "\nKVIST", "print('hello')\nKVIST"),), {}),
    ("sets an environment variable", "PL-05", ((PLUGIN, "\nKVIST", "import os\nos.environ['OMP'] = '1'\nKVIST"),), {}),
    ("seeds random", "PL-05", ((PLUGIN, "\nKVIST", "import random\nrandom.seed(0)\nKVIST"),), {}),
    (
        "starts a thread",
        "PL-05",
        (
            (
                PLUGIN,
                "\nKVIST",
                "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nKVIST",
            ),
        ),
        {},
    ),
    ("misspells a hook", "PL-06", ((PLUGIN, "def kvist_cache_managers", "def kvist_cache_manager"),), {}),
    ("gives a hook a default", "PL-06", ((PLUGIN, HOOK, "def kvist_attention_backends(fast=True):\n"),), {}),
    ("returns one record instead of a list", "PL-06", ((PLUGIN, "return [backend]", "return backend"),), {}),
    ("forgets to return", "PL-06", ((PLUGIN, "    return [\n        Cache", "    [\n        Cache"),), {}),
    (
        "returns no record",
        "PL-06",
        ((PLUGIN, "    return [\n        Cache", "    return []\n    [\n        Cache"), (PLUGIN, "[backend]", "[]")),
        {},
    ),
    ("takes the name of a built-in backend", "PL-07", ((PLUGIN, "sound-torch", "torch-reference"),), {}),
    ("takes the name of a neighbour's record", "PL-07", (), NEIGHBOUR),
    ("ties with a built-in backend", "PL-07", ((PLUGIN, 'families=("sound",)', 'families=("gqa",)'),), {}),
    ("misspells an object of its own", "PL-08", ((PLUGIN, "spec:cache_spec", "spec:cache_specs"),), {}),
    ("names a backend that lacks a method", "PL-08", ((BACKEND, "def forward", "def forwards"),), {}),
    (
        "names an adapter that is no callable",
        "PL-08",
        ((SPEC, "def adapt(model, spec):\n    return model", "adapt = 3"),),
        {},
    ),
    ("names a factory whose module fails", "PL-08", ((SPEC, "from kvist.spec", "1 / 0\nfrom kvist.spec"),), {}),
    (
        "names its record by the process",
        "PL-09",
        ((PLUGIN, 'name="sound",', 'name=f"sound-{__import__("os").getpid()}",'),),
        {},
    ),
    (
        "adds a record at each call",
        "PL-09",
        (
            (PLUGIN, "\nKVIST", "seen = []\nKVIST"),
            (PLUGIN, 'name="sound",', 'name=f"sound{len(seen)}",'),
            (PLUGIN, HOOK, HOOK + "    seen.append(1)\n"),
        ),
        {},
    ),
    (
        "refuses to be loaded twice",
        "PL-09",
        (
            (PLUGIN, "\nKVIST", "seen = []\nKVIST"),
            (PLUGIN, HOOK, HOOK + "    if seen:\n        raise ValueError('already registered')\n    seen.append(1)\n"),
        ),
        {},
    ),
    ("takes the config only", "PL-10", ((SPEC, "config, *, block_tokens, dtype", "config"),), {}),
    ("returns the layers and no spec", "PL-10", ((SPEC, "CacheSpec((Layer", "tuple((Layer"),), {}),
    ("crashes on a missing field", "PL-11", ((SPEC, 'config.get("width")', 'config["width"]'),), {}),
    ("lets a bad value through", "PL-11", ((SPEC, " or width < 1", ""), (SPEC, "(width,)", "(max(width, 1),)")), {}),
    ("does not name the value", "PL-11", ((SPEC, "width={width!r}", "width"),), {}),
)

MUTANTS = tuple(
    Mutant(name, clause, functools.partial(changed, *edits, more=more)) for name, clause, edits, more in _FAULTS
)
