"""The three hooks through which everything enters Kvist, built-ins included.

A plugin module looks like this, and imports neither torch nor triton when it is imported::

    from kvist.hookspecs import hookimpl
    from kvist.records import CacheManagerInfo

    KVIST_SPEC = (1, 0)

    @hookimpl
    def kvist_cache_managers():
        return [CacheManagerInfo(name="acme", model_types=("acme",), spec_factory="kvist_acme.spec:cache_spec")]

Hooks take plain positional parameters only: no defaults, no keyword-only ones (pluggy 1.6 and 1.7 treat them
differently), no wrappers. They are called at configuration time and never on a hot path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from kvist.records import AttentionBackendInfo, CacheManagerInfo, TransceiverInfo

#: The project's name in pluggy, and the group of its entry points.
GROUP: Final = "kvist"

#: Version of the hooks and of the records they return, apart from any distribution's version. The minor grows when a
#: hook, an argument or a field is added, the major when one is removed or changes its meaning. A plugin declares the
#: version that it was written for as ``KVIST_SPEC``; it is loaded when the major is the same and the minor not newer.
SPEC_VERSION: Final = (1, 0)

hookspec = pluggy.HookspecMarker(GROUP)

#: Marks a function of a plugin as the implementation of the hook with its name.
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def kvist_cache_managers() -> list[CacheManagerInfo]:
    """The model families that the plugin serves.

    Called once for each loading of the plugins of a process, before any cache exists. Nothing is passed. The caller
    keeps the returned records, which are frozen; it may drop the list. The implementation imports nothing heavy: the
    records name their factories, which are imported when a record is selected. It must not depend on other plugins
    or on the order of calls.

    Returns a list of records, which may be empty. Whatever it raises marks the plugin as broken.

    .. versionadded:: 1.0
    """


@hookspec
def kvist_attention_backends() -> list[AttentionBackendInfo]:
    """The attention backends that the plugin brings.

    Called once for each loading of the plugins of a process, before any backend is built. The rules are those of
    :func:`kvist_cache_managers`. Whether the machine has the right device is not the implementation's business: the
    record's ``devices`` and ``requires`` say where the backend can run, and the registry chooses.

    Returns a list of records, which may be empty. Whatever it raises marks the plugin as broken.

    .. versionadded:: 1.0
    """


@hookspec
def kvist_transceivers() -> list[TransceiverInfo]:
    """The transports that the plugin brings.

    Called once for each loading of the plugins of a process, before any connection is opened. The rules are those of
    :func:`kvist_cache_managers`. The implementation opens no device, socket or shared library.

    Returns a list of records, which may be empty. Whatever it raises marks the plugin as broken.

    .. versionadded:: 1.0
    """
