"""Run the kit against one plugin: an installed one, whose suites an entry point names, or the tests of a checkout.

A distribution names the module of its suites, classes ``Test...``, under the plugin's own name::

    [project.entry-points."kvist.conformance"]
    acme = "kvist_acme.conformance"

The module is imported only here. :class:`~kvist.testing.packaging.PluginTests` runs for every installed plugin, whether
its module has them or not.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Literal

import attrs
import importlib_metadata
import pytest

from kvist.errors import PluginError
from kvist.plugins import ALLOW_VARIABLE, LoadedPlugin, PluginRecord, examine, plan
from kvist.plugins.discovery import entry_points, suggest
from kvist.records import CacheManagerInfo
from kvist.testing.clauses import Clause, clauses, numbers_of
from kvist.testing.outcomes import NOT_APPLICABLE, NOT_RUN_HERE, UNDECLARED
from kvist.testing.packaging import PluginTests

#: Group of the entry points that name modules of suites, by the plugin's name.
SUITE_GROUP = "kvist.conformance"

Status = Literal["passed", "failed", "not applicable", "not run here"]

#: The clauses of the managers' part that are about spec factories.
_SPEC_CLAUSES = {f"CM-{number:02}" for number in range(1, 7)}


@attrs.frozen
class Test:
    """One test that ran. text: why it was skipped, or what a failing one reports."""

    name: str
    numbers: tuple[str, ...]
    outcome: Literal["passed", "failed", "skipped"]
    text: str = ""

    #: Not for pytest to collect.
    __test__ = False


@attrs.frozen
class Outcome:
    """What became of one clause. notes: reasons of tests that did not run, and what works without being declared."""

    clause: Clause
    status: Status
    tests: tuple[Test, ...]
    notes: tuple[str, ...]


@attrs.frozen
class Conformance:
    """All clauses for one plugin, in the order of the document."""

    plugin: str
    origin: str
    core_version: str
    outcomes: tuple[Outcome, ...]

    @property
    def conforms(self) -> bool:
        """Has no clause failed?"""
        return not self.count("failed")

    def count(self, status: Status) -> int:
        """How many clauses ended like this."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def badge(self) -> str:
        """A line of Markdown for a README."""
        left = self.count("not run here")
        text = f"{self.count('passed')} clauses passed" + (f", {left} not run" if left else "")
        if not self.conforms:
            text = f"{self.count('failed')} clauses failed"
        label = _escaped(f"kvist {self.core_version} contract")
        colour = "red" if not self.conforms else "yellow" if left else "brightgreen"
        return f"![{text}](https://img.shields.io/badge/{label}-{_escaped(text)}-{colour})"


def conform(name: str, checkout: Path | None = None, progress: Callable[[str], None] = lambda _: None) -> Conformance:
    """Run what there is for the plugin ``name``. ``progress`` is told the name of each test that begins.

    checkout: run the tests in this folder that have a clause, with the folder's own configuration, instead of what the
        installed distribution names.
    Raises PluginError when there is no such plugin, or its suites cannot be collected.
    """
    found = [record for record in plan({ALLOW_VARIABLE: name}).records if record.name == name]
    record = found[0] if found else None
    if checkout is None and record is None:
        known = sorted({each.name for each in plan({}).records})
        raise PluginError(
            f"no installed plugin is named {name!r}{suggest(name, known)}",
            hint=f"installed plugins: {', '.join(known)}; for one that is not installed name its checkout with --path",
        )
    if checkout is not None:
        if not checkout.is_dir():
            raise PluginError(f"there is no folder {checkout}")
        with _on_path(checkout / "src"):
            ran = _run([str(checkout), "-m", "clause", "--import-mode=importlib"], progress)
        missing = f"the tests in {checkout} have none of it"
    else:
        assert record is not None
        ran = _run_installed(record, progress)
        missing = f"{record.distribution} names no suite for it in the entry points {SUITE_GROUP!r}"
    loaded = _loaded(name) if record is not None else None
    outcomes = [
        _outcome(clause, [test for test in ran if clause.number in test.numbers], loaded, missing)
        for clause in clauses().values()
    ]
    origin = record.origin if record is not None else str(checkout)
    return Conformance(name, origin, importlib_metadata.version("kvist"), tuple(outcomes))


def _loaded(name: str) -> LoadedPlugin | None:
    plugins = examine(plan({ALLOW_VARIABLE: name})).plugins
    return next((plugin for plugin in plugins if plugin.record.name == name), None)


def _run_installed(record: PluginRecord, progress: Callable[[str], None]) -> list[Test]:
    points = {
        point.value
        for point in entry_points(SUITE_GROUP)[0]
        if point.name == record.name and point.dist is not None and point.dist.name == record.distribution
    }
    hint = f"mend the entry points {SUITE_GROUP!r} of {record.distribution}, or reinstall it"
    files, packaged = [], False
    for value in sorted(points):
        try:
            module = importlib.import_module(value)
        except Exception as error:
            raise PluginError(
                f"cannot import {value!r}, which {record.origin} names for its suites: {type(error).__name__}: {error}",
                hint=hint,
            ) from error
        suites = [each for key, each in inspect.getmembers(module, inspect.isclass) if key.startswith("Test")]
        if not any(numbers_of(test) for suite in suites for _, test in inspect.getmembers(suite, inspect.isfunction)):
            raise PluginError(f"{value!r} of {record.origin} has no class Test... with tests of a clause", hint=hint)
        packaged = packaged or any(issubclass(suite, PluginTests) for suite in suites)
        files.append(str(module.__file__))
    with tempfile.TemporaryDirectory() as folder:
        # An empty configuration: nobody's settings, wherever the command is run.
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n", encoding="utf-8")
        if not packaged:
            suite = Path(folder, "test_packaging.py")
            suite.write_text(
                "from kvist.testing.packaging import PluginTests\n\n\n"
                f"class TestPackaging(PluginTests):\n    name = {record.name!r}\n",
                encoding="utf-8",
            )
            files.insert(0, str(suite))
        return _run([*files, "-c", str(settings), "--rootdir", folder, "--import-mode=importlib"], progress)


def _run(arguments: Sequence[str], progress: Callable[[str], None]) -> list[Test]:
    """Run pytest in this process, without the plugins of the environment. Raises PluginError if it cannot collect."""
    listener = _Listener(progress)
    options = ["-p", "no:cacheprovider", "-p", "kvist.testing.plugin"]
    # What pytest prints for people is not wanted here; its options may be in a checkout's configuration.
    with (
        _variable("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"),
        _variable("PYTEST_ADDOPTS", ""),
        redirect_stdout(io.StringIO()),
    ):
        code = pytest.main([*arguments, *options], plugins=[listener])
    if listener.faults:
        raise PluginError("the suites cannot be collected:\n" + "\n".join(listener.faults))
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        return []
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise PluginError(
            f"pytest ended with {pytest.ExitCode(code).name}", hint=f"see `pytest {' '.join(arguments[:3])}`"
        )
    return list(listener.tests.values())


class _Listener:
    """Takes the tests of a clause, with the worst of what their setup, call and teardown say."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.tests: dict[str, Test] = {}
        self.faults: list[str] = []
        self._progress = progress

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._progress(_short(nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.faults.append(report.longreprtext.strip())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        numbers = tuple(str(value) for key, value in report.user_properties if key == "clause")
        known = self.tests.get(report.nodeid)
        if not numbers or (known is not None and known.outcome != "passed"):
            return
        text = report.longreprtext.strip()
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        self.tests[report.nodeid] = Test(_short(report.nodeid), numbers, report.outcome, text)


def _outcome(clause: Clause, tests: list[Test], loaded: LoadedPlugin | None, missing: str) -> Outcome:
    if not tests:
        why = _why_not_applicable(clause.number, loaded)
        return Outcome(clause, "not applicable", (), (why,)) if why else Outcome(clause, "not run here", (), (missing,))
    reasons = tuple(dict.fromkeys(test.text for test in tests if test.outcome == "skipped"))
    status: Status = "not run here"
    if any(test.outcome == "failed" for test in tests):
        status = "failed"
    elif any(test.outcome == "passed" or test.text.startswith(UNDECLARED) for test in tests):
        status = "passed"
    elif all(reason.startswith(NOT_APPLICABLE) for reason in reasons):
        status = "not applicable"
    own = {"not applicable": f"{NOT_APPLICABLE}: ", "not run here": f"{NOT_RUN_HERE}: "}.get(status, "")
    return Outcome(clause, status, tuple(tests), tuple(reason.removeprefix(own) for reason in reasons))


def _why_not_applicable(number: str, loaded: LoadedPlugin | None) -> str:
    """Why nobody would expect tests of a clause; empty if one would."""
    if loaded is None:
        return ""
    if number.startswith("CM"):
        if not loaded.cache_managers:
            return "the plugin brings no cache manager"
        standard = attrs.fields(CacheManagerInfo).manager_factory.default
        if number not in _SPEC_CLAUSES and all(info.manager_factory == standard for info in loaded.cache_managers):
            return "the plugin uses Kvist's own manager"
    if number.startswith("AB") and not loaded.attention_backends:
        return "the plugin brings no attention backend"
    if number.startswith("TR") and not loaded.transceivers:
        return "the plugin brings no transceiver"
    return ""


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """What a checkout's tests import is the checkout, installed or not."""
    before = list(sys.path)
    if folder.is_dir():
        sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


def _short(nodeid: str) -> str:
    """A test's name without its file."""
    return nodeid.partition("::")[2] or nodeid


def _escaped(text: str) -> str:
    return text.replace("-", "--").replace("_", "__").replace(" ", "_").replace(",", "%2C")
