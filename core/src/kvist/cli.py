"""The command ``kvist``.

A command is a plain function with typer annotations, named by an entry point of the group ``kvist.commands``; the
core's own, except ``plugins``, come the same way. Its module is imported when the command is invoked or its own help
is asked for, so that one broken or slow command never concerns the others.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any

import attrs
import importlib_metadata
import typer
from typer.core import TyperCommand, TyperGroup

from kvist.errors import KvistError, PluginError
from kvist.hookspecs import SPEC_VERSION
from kvist.plugins.discovery import CORE, PluginPlan, about, entry_points, plan
from kvist.plugins.loading import LoadedPlugin, LoadedPlugins, PluginWarning, examine
from kvist.plugins.source import inspect_sources, summary
from kvist.registry import Registry, resolve

COMMAND_GROUP = "kvist.commands"


@attrs.frozen
class _Command:
    """A command that is known by name only. ``fault`` says why it cannot be used at all."""

    name: str
    value: str
    origin: str
    fault: str = ""

    @property
    def distribution(self) -> str:
        """The distribution that offers the command."""
        return self.origin.partition(" ")[0]

    def stub(self) -> Any:
        """Stands for the command in lists; nothing is imported for it."""
        text = self.fault or summary(self.value)
        return TyperCommand(self.name, help=f"{text} (from {self.origin})" if text else f"From {self.origin}.")

    def load(self) -> Any:
        """The real command. Raises PluginError when it cannot be imported or is no function."""
        if self.fault:
            raise PluginError(f"command {self.name!r} cannot be used: {self.fault}", hint="uninstall one of them")
        hint = f"mend or uninstall {self.distribution}"
        function = resolve(self.value, what=f"command {self.name!r} of {self.origin}", hint=hint)
        if not callable(function):
            raise PluginError(f"command {self.name!r} of {self.origin}: {self.value} is not a function", hint=hint)
        single = typer.Typer(add_completion=False)
        single.command(self.name)(function)
        return typer.main.get_command(single)


def _commands() -> dict[str, _Command]:
    commands: dict[str, _Command] = {}
    for point in entry_points(COMMAND_GROUP)[0]:
        if point.dist is None:
            continue
        name, version, _ = about(point.dist)
        command = _Command(point.name, point.value, f"{name} {version}")
        other = commands.get(point.name, command)
        # The core's commands cannot be taken over; between two others nobody is right.
        if CORE in (command.distribution, other.distribution):
            command = command if command.distribution == CORE else other
        elif other != command:
            both = " and ".join(sorted((other.origin, command.origin)))
            command = attrs.evolve(other, fault=f"{both} both offer it")
        commands[point.name] = command
    return commands


class _LazyGroup(TyperGroup):
    """Adds the commands of all distributions to those of this module."""

    # One group is made for each run of the command line; the environment is read once for it.
    @cached_property
    def _lazy(self) -> dict[str, _Command]:
        return _commands()

    # The types of contexts and commands are private to typer, and differ between its versions.
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        command = self._lazy.get(cmd_name)
        return None if command is None else command.stub()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name not in self.commands and (lazy := self._lazy.get(name)):
            command = lazy.load()
        return name, command, rest


app = typer.Typer(
    name="kvist",
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keeps the KV caches of large-language-model inference.",
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"kvist {importlib_metadata.version(CORE)}")
        raise typer.Exit


@app.callback()
def _kvist(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps the KV caches of large-language-model inference."""


@app.command()
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    load: Annotated[
        bool, typer.Option("--load", help="Import the plugins that are ready, and show what they provide.")
    ] = False,
) -> None:
    """Show every installed plugin with its version, hook version, status and reason.

    Without --load no plugin is imported: versions come from metadata and from the text of the source.
    """
    found = inspect_sources(plan())
    loaded = examine(found) if load else LoadedPlugins(found, ())
    clash = _clash(loaded)
    if as_json:
        typer.echo(json.dumps(_as_json(loaded, clash), indent=2))
    else:
        _print_table(loaded, clash, imported=load)


def _clash(loaded: LoadedPlugins) -> str:
    """What keeps the loaded plugins from working together; empty if nothing does."""
    try:
        Registry(loaded)
    except PluginError as error:
        return str(error)
    return ""


def _provides(plugin: LoadedPlugin) -> dict[str, list[str]]:
    return {
        "cache_managers": [info.name for info in plugin.cache_managers],
        "attention_backends": [info.name for info in plugin.attention_backends],
        "transceivers": [info.name for info in plugin.transceivers],
    }


def _unavailable(plugin: LoadedPlugin) -> dict[str, str]:
    """Why some of the plugin's backends cannot run here, by name."""
    return {info.name: info.unavailable for info in plugin.attention_backends if info.unavailable}


def _shown(plugin: LoadedPlugin) -> str:
    reasons = _unavailable(plugin)
    names = (name for names in _provides(plugin).values() for name in names)
    return ", ".join(f"{name} (unavailable: {reasons[name]})" if name in reasons else name for name in names)


def _problems(found: PluginPlan, clash: str) -> list[str]:
    return [f"{problem.message}\nhint: {problem.hint}" for problem in found.problems] + ([clash] if clash else [])


def _as_json(loaded: LoadedPlugins, clash: str) -> dict[str, Any]:
    provided = {plugin.record.name: _provides(plugin) for plugin in loaded.plugins}
    unavailable = {plugin.record.name: _unavailable(plugin) for plugin in loaded.plugins}
    return {
        "kvist": loaded.plan.core_version,
        "hook_version": list(SPEC_VERSION),
        "problems": _problems(loaded.plan, clash),
        "plugins": [
            {
                "name": record.name,
                "distribution": record.distribution,
                "version": record.version,
                "value": record.value,
                "hook_version": None if record.spec is None else list(record.spec),
                "status": record.status,
                "reason": record.reason,
                "hooks": list(record.hooks),
                "provides": provided.get(record.name) if record.status == "loaded" else None,
                "unavailable": unavailable.get(record.name, {}),
            }
            for record in loaded.plan.records
        ],
    }


def _print_table(loaded: LoadedPlugins, clash: str, *, imported: bool) -> None:
    # Imported here and not above: rich is only for people, and the JSON output is for scripts that call often.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"loaded": "green", "ready": "green", "disabled": "dim"}
    provided = {plugin.record.name: _shown(plugin) for plugin in loaded.plugins}
    table = Table(title=f"kvist {loaded.plan.core_version}, hook version {_dotted(SPEC_VERSION)}")
    for heading in ("plugin", "distribution", "version", "hooks", "status", "provides" if imported else "reason"):
        table.add_column(heading, overflow="fold")
    for record in loaded.plan.records:
        about = record.reason or (provided.get(record.name, "") if imported else "")
        table.add_row(
            Text(record.name),
            Text(record.distribution),
            Text(record.version),
            _dotted(record.spec) if record.spec else "-",
            Text(record.status, style=colours.get(record.status, "red")),
            Text(about),
        )
    console = Console()
    console.print(table)
    for problem in _problems(loaded.plan, clash):
        console.print(Text(f"problem: {problem}", style="red"))
    if not imported and any(record.status == "ready" for record in loaded.plan.records):
        console.print("Plugins that are ready were not imported; `kvist plugins --load` imports and checks them.")


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


def _plain_warnings(show: Callable[..., str]) -> Callable[..., str]:
    def formatted(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> str:
        if issubclass(category, PluginWarning):
            return f"warning: {message}\n"
        return show(message, category, *rest, **named)

    return formatted


def main() -> None:
    """Run the command line. An error that Kvist raises on purpose is printed without a traceback; exit code 1."""
    warnings.formatwarning = _plain_warnings(warnings.formatwarning)
    try:
        app()
    except KvistError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
