"""The command line: it tells everything about broken plugins and commands, and breaks with none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import importlib_metadata
import pytest

from kvist import cli

CORE_VERSION = importlib_metadata.version("kvist")

COMMAND = """
from typing import Annotated
import typer

def command(word: str, loud: Annotated[bool, typer.Option(help="Say it loudly.")] = False) -> None:
    \"\"\"Say a word.

    And nothing else.
    \"\"\"
    typer.echo(word.upper() if loud else word)
"""


@pytest.fixture
def kvist(site, monkeypatch, capsys):
    """Runs ``kvist`` in this process; gives exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("warnings.formatwarning", __import__("warnings").formatwarning)
    for variable, value in site.environ().items():
        monkeypatch.setenv(variable, value)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvist", *arguments])
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        else:
            code = 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def listed(output, name):
    return next(each for each in json.loads(output)["plugins"] if each["name"] == name)


def test_plugins_lists_without_importing(site, kvist):
    site.add("good")
    site.add("slow", "import time; time.sleep(60)")
    site.add("old", requires=("kvist<0.0.1",))
    code, output, errors = kvist("plugins", "--json")
    assert (code, errors) == (0, "")
    whole = json.loads(output)
    assert (whole["kvist"], whole["hook_version"], whole["problems"]) == (CORE_VERSION, [1, 0], [])
    assert listed(output, "good") == {
        "name": "good",
        "distribution": "kvist-good",
        "version": "1.0",
        "value": "good_plugin",
        "hook_version": [1, 0],
        "status": "ready",
        "reason": "",
        "hooks": [],
        "provides": None,
        "unavailable": {},
    }
    assert listed(output, "slow")["status"] == "ready"
    assert listed(output, "old")["reason"] == f"needs kvist<0.0.1, have kvist {CORE_VERSION}"
    assert not {"good_plugin", "slow_plugin", "old_plugin"} & set(sys.modules)


def test_plugins_can_be_loaded_and_broken_ones_shown(site, kvist):
    site.add("good")
    site.add("fake", "1 / 0")
    code, output, errors = kvist("plugins", "--load", "--json")
    assert (code, errors) == (0, "")
    good, fake = listed(output, "good"), listed(output, "fake")
    assert (good["status"], good["hooks"]) == ("loaded", ["kvist_cache_managers"])
    assert good["provides"] == {"cache_managers": ["good"], "attention_backends": [], "transceivers": []}
    assert (fake["status"], fake["reason"]) == ("broken", "ZeroDivisionError: division by zero")
    assert fake["provides"] is None


def test_the_table_shows_every_plugin_with_its_reason(site, kvist):
    site.add("good")
    site.add("fake", "1 / 0")
    code, output, errors = kvist("plugins")
    assert (code, errors) == (0, "")
    assert f"kvist {CORE_VERSION}, hook version 1.0" in output
    assert "`kvist plugins --load` imports and checks them" in output
    code, output, errors = kvist("plugins", "--load")
    assert (code, errors) == (0, "")
    (row,) = [line for line in output.splitlines() if "kvist-fake" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "fake",
        "kvist-fake",
        "1.0",
        "-",
        "broken",
        "ZeroDivisionError: division by zero",
    ]


def test_problems_of_the_selection_are_shown_and_do_not_break_the_list(site, kvist, monkeypatch):
    site.add("good")
    monkeypatch.setenv("KVIST_PLUGINS", "god")
    code, output, _ = kvist("plugins", "--json")
    assert code == 0
    (problem,) = json.loads(output)["problems"]
    assert problem.startswith("KVIST_PLUGINS names 'god', which is not installed; did you mean 'good'?\nhint: ")
    assert "problem: KVIST_PLUGINS names 'god'" in kvist("plugins")[1]


def test_two_plugins_with_one_record_are_a_problem(site, kvist):
    site.add("good")
    site.add("twin", "from good_plugin import *\nKVIST_SPEC = (1, 0)")
    code, output, _ = kvist("plugins", "--load", "--json")
    assert code == 0
    assert json.loads(output)["problems"] == [
        "two plugins provide cache manager 'good': 'good' of kvist-good 1.0 and 'twin' of kvist-twin 1.0\n"
        "hint: add one of the two plugins to KVIST_DISABLE_PLUGINS, or uninstall it"
    ]


def test_the_version(kvist):
    assert kvist("--version") == (0, f"kvist {CORE_VERSION}\n", "")


# Commands of other distributions


def test_a_command_of_another_distribution_runs(site, kvist):
    site.add("say", COMMAND, value="say_plugin", commands={"say": "say_plugin:command"})
    assert kvist("say", "hello", "--loud") == (0, "HELLO\n", "")
    code, output, _ = kvist("say", "--help")
    assert code == 0
    assert "Say it loudly." in output


def test_the_list_of_commands_imports_none(site, kvist):
    site.add("say", COMMAND, commands={"say": "say_plugin:command"})
    site.add("bad", "1 / 0", commands={"bad": "bad_plugin:command"})
    code, output, _ = kvist("--help")
    assert code == 0
    assert "Say a word. (from kvist-say 1.0)" in output
    assert "From kvist-bad 1.0." in output
    assert not {"say_plugin", "bad_plugin"} & set(sys.modules)


def test_a_broken_command_is_told_by_name_and_breaks_no_other(site, kvist):
    site.add("say", COMMAND, commands={"say": "say_plugin:command"})
    site.add("bad", "1 / 0", commands={"bad": "bad_plugin:command"})
    assert kvist("say", "hello") == (0, "hello\n", "")
    assert kvist("bad") == (
        1,
        "",
        "error: cannot import 'bad_plugin' for command 'bad' of kvist-bad 1.0: "
        "ZeroDivisionError: division by zero\nhint: mend or uninstall kvist-bad\n",
    )


def test_a_command_must_be_a_function(site, kvist):
    site.add("bad", "command = 3", commands={"bad": "bad_plugin:command"})
    code, _, errors = kvist("bad")
    assert code == 1
    assert errors == (
        "error: command 'bad' of kvist-bad 1.0: bad_plugin:command is not a function\n"
        "hint: mend or uninstall kvist-bad\n"
    )


def test_two_distributions_with_one_command(site, kvist):
    site.add("say", COMMAND, distribution="kvist-a", commands={"say": "say_plugin:command"})
    site.add("shout", COMMAND, distribution="kvist-b", commands={"say": "shout_plugin:command"})
    assert "kvist-a 1.0 and kvist-b 1.0 both offer it" in kvist("--help")[1]
    assert kvist("say", "hello") == (
        1,
        "",
        "error: command 'say' cannot be used: kvist-a 1.0 and kvist-b 1.0 both offer it\nhint: uninstall one of them\n",
    )


def test_the_commands_of_the_core_cannot_be_taken_over(site, kvist):
    evil = {"plugins": "evil_plugin:command", "replay": "evil_plugin:command"}
    site.add("evil", COMMAND, distribution="a-kvist-evil", commands=evil)
    code, output, _ = kvist("plugins", "--json")
    assert code == 0
    assert listed(output, "evil")["distribution"] == "a-kvist-evil"
    assert cli._commands()["replay"].origin == f"kvist {CORE_VERSION}"


def test_an_unknown_command(kvist):
    code, output, errors = kvist("plugin")
    assert code == 2
    assert "No such command 'plugin'. Did you mean 'plugins'?" in output + errors


def test_errors_of_kvist_are_printed_without_a_traceback(site, kvist):
    source = "from kvist.errors import CapacityError\ndef command():\n    raise CapacityError('full', hint='more')\n"
    site.add("fill", source, commands={"fill": "fill_plugin:command"})
    assert kvist("fill") == (1, "", "error: full\nhint: more\n")


def test_warnings_about_plugins_are_shown_without_a_line_of_source(site):
    source = (
        "import warnings\nfrom kvist.plugins import PluginWarning\n"
        "def command():\n    warnings.warn('odd\\nhint: mend it', PluginWarning)\n    warnings.warn('else')\n"
    )
    site.add("warn", source, commands={"warn": "warn_plugin:command"})
    environ = {**os.environ, "PYTHONPATH": str(site.path("site"))}
    ran = subprocess.run([sys.executable, "-m", "kvist", "warn"], env=environ, capture_output=True, text=True)
    assert ran.returncode == 0
    assert ran.stderr.startswith("warning: odd\nhint: mend it\n")
    assert "warn_plugin.py:5: UserWarning: else" in ran.stderr
