"""``kvist conform``: installed plugins and checkouts, what becomes of every clause, and what is wrong in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from kvist.errors import PluginError
from kvist.testing.clauses import clauses
from kvist.testing.conform import conform
from kvist.testing.conform_command import command

CORE = Path(__file__).parents[2]

#: As the entry point of the command would call it.
COMMAND = "import typer; from kvist.testing.conform_command import command; typer.run(command)"

ENTRY = """
from kvist.hookspecs import hookimpl
from kvist.records import CacheManagerInfo

KVIST_SPEC = (1, 0)

@hookimpl
def kvist_cache_managers():
    return [CacheManagerInfo(name="odd", model_types=("odd",), spec_factory="odd_plugin:spec")]

def spec(config, *, block_tokens, dtype):
    from kvist.errors import SpecError
    raise SpecError("odd: nothing is served")
"""

SUITES = """
import pytest
import typer
from kvist.testing.outcomes import not_applicable, not_run_here, undeclared
from kvist.testing.packaging import PluginTests

class TestOdd:
    @pytest.mark.clause("CM-01")
    def test_good(self):
        pass

    @pytest.mark.clause("CM-01", "CM-02")
    def test_bad(self):
        assert 1 + 1 == 3, "counted wrong"

    @pytest.mark.clause("CM-03")
    def test_not_mine(self):
        not_applicable("no rows")

    @pytest.mark.clause("CM-04")
    @pytest.mark.parametrize("way", [not_applicable, not_run_here])
    def test_elsewhere(self, way):
        way("no device")

    @pytest.mark.clause("CM-05")
    def test_more(self):
        undeclared("forks")

    def test_of_no_clause(self):
        raise AssertionError

class TestPackaging(PluginTests):
    name = "odd"

    @pytest.mark.clause("PL-01")
    def test_it_is_found_in_metadata(self):
        pass
"""


def installed(site: Path, monkeypatch: pytest.MonkeyPatch, suites: str | None, *, value: str = "odd_suites") -> None:
    """A distribution ``kvist-odd``, found by this process and by those that it starts."""
    info = site / "kvist_odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: kvist-odd\nVersion: 1.0\nRequires-Dist: kvist>=0.1,<0.2\n")
    points = "[kvist]\nodd = odd_plugin\n"
    if suites is not None:
        points += f"[kvist.conformance]\nodd = {value}\n"
        (site / "odd_suites.py").write_text(suites)
    (info / "entry_points.txt").write_text(points)
    (site / "odd_plugin.py").write_text(ENTRY)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])))
    for module in ("odd_plugin", "odd_suites"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def outcomes(result) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {outcome.clause.number: (outcome.status, outcome.notes) for outcome in result.outcomes}


def test_every_clause_has_one_outcome(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, SUITES)
    asked: list[str] = []
    result = conform("odd", progress=asked.append)
    assert list(outcomes(result)) == list(clauses())
    told = outcomes(result)
    assert told["CM-01"] == told["CM-02"] == ("failed", ())
    assert told["CM-03"] == ("not applicable", ("no rows",))
    assert told["CM-04"] == ("not run here", ("not applicable: no device", "no device"))
    assert told["CM-05"] == ("passed", ("works, but is not declared: forks",))
    assert told["CM-06"] == (
        "not run here",
        ("kvist-odd names no suite for it in the entry points 'kvist.conformance'",),
    )
    assert told["CM-07"] == ("not applicable", ("the plugin uses Kvist's own manager",))
    assert told["AB-01"] == ("not applicable", ("the plugin brings no attention backend",))
    # The packaging tests are those of its own class.
    assert told["PL-01"] == told["PL-03"] == ("passed", ())
    assert told["PL-10"] == ("not run here", ("the author's class has no configs()",))
    assert not result.conforms and result.origin == "kvist-odd 1.0"
    (bad,) = result.outcomes[list(told).index("CM-02")].tests
    assert bad.name == "TestOdd::test_bad" and "AssertionError: counted wrong" in bad.text
    assert "TestOdd::test_good" in asked
    assert result.badge == (
        "![2 clauses failed](https://img.shields.io/badge/kvist_0.1.0_contract-2_clauses_failed-red)"
    )


def test_a_plugin_without_suites_is_tested_as_a_distribution(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, None)
    result = conform("odd")
    told = outcomes(result)
    assert told["PL-01"] == told["PL-02"] == told["PL-11"][:1] + told["PL-01"][1:] == ("passed", ())
    assert told["CM-01"][0] == "not run here"
    assert result.conforms
    passed, left = result.count("passed"), result.count("not run here")
    assert passed >= 8 and left >= 6
    assert result.badge == (
        f"![{passed} clauses passed, {left} not run](https://img.shields.io/badge/"
        f"kvist_0.1.0_contract-{passed}_clauses_passed%2C_{left}_not_run-yellow)"
    )


def test_a_checkout_is_tested_with_its_own_tests(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "never_installed.py").write_text("ANSWER = 42")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import never_installed, pytest\n"
        "@pytest.mark.clause('CM-13')\ndef test_one(): assert never_installed.ANSWER == 42\n"
        "def test_of_no_clause(): assert False\n"
    )
    path = list(sys.path)
    result = conform("never-installed", tmp_path)
    assert sys.path == path
    told = outcomes(result)
    assert told["CM-13"] == ("passed", ()) and result.conforms
    assert told["PL-01"] == ("not run here", (f"the tests in {tmp_path} have none of it",))
    assert result.count("passed") == 1 and result.origin == str(tmp_path)


def test_a_checkout_that_makes_errors_of_warnings(tmp_path):
    """The command has imported a part of the kit before pytest could rewrite its asserts."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = -ra\n")
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.clause('CM-13')\ndef test_one(): pass\n")
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, "odd", "--path", str(tmp_path), "--badge"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("![1 clauses passed")


def test_what_is_wrong_is_said_in_words(tmp_path, monkeypatch):
    with pytest.raises(PluginError) as caught:
        conform("bultin")
    what, _, hint = str(caught.value).partition("\nhint: installed plugins: ")
    names, _, rest = hint.partition("; ")
    assert what == "no installed plugin is named 'bultin'; did you mean 'builtin'?"
    assert "builtin" in names.split(", ") and rest == "for one that is not installed name its checkout with --path"
    with pytest.raises(PluginError) as caught:
        conform("odd", tmp_path / "nowhere")
    assert str(caught.value) == f"there is no folder {tmp_path / 'nowhere'}"
    (tmp_path / "test_broken.py").write_text("import no_such_module_anywhere")
    with pytest.raises(PluginError) as caught:
        conform("odd", tmp_path)
    assert str(caught.value).startswith("the suites cannot be collected:\n")
    assert "No module named 'no_such_module_anywhere'" in str(caught.value)


@pytest.mark.parametrize(
    ("suites", "value", "text"),
    [
        (
            "",
            "odd_suits",
            "cannot import 'odd_suits', which kvist-odd 1.0 names for its suites: ModuleNotFoundError: No module named "
            "'odd_suits'",
        ),
        (
            "class TestNothing:\n    def test(self): pass",
            "odd_suites",
            "'odd_suites' of kvist-odd 1.0 has no class Test... with tests of a clause",
        ),
    ],
)
def test_a_wrong_entry_point_is_said_in_words(suites, value, text, tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, suites, value=value)
    with pytest.raises(PluginError) as caught:
        conform("odd")
    assert str(caught.value) == (
        f"{text}\nhint: mend the entry points 'kvist.conformance' of kvist-odd, or reinstall it"
    )


def test_the_command_prints_json_a_table_or_a_badge(tmp_path, capsys):
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\n@pytest.mark.clause('CM-13')\ndef test_one(): assert 1 == 2, 'not one'\n")
    for options in ({"as_json": True}, {"badge": True}, {}):
        with pytest.raises(typer.Exit) as caught:
            command("odd", tmp_path, **options)
        assert caught.value.exit_code == 1
        printed = capsys.readouterr().out
        if options.get("as_json"):
            told = json.loads(printed)
            assert (told["plugin"], told["conforms"], told["origin"]) == ("odd", False, str(tmp_path))
            (failed,) = [clause for clause in told["clauses"] if clause["status"] == "failed"]
            assert failed["number"] == "CM-13" and failed["change"] == clauses()["CM-13"].change
            assert failed["tests"][0]["name"] == "test_one" and "not one" in failed["tests"][0]["text"]
        elif options.get("badge"):
            assert printed == (
                "![1 clauses failed](https://img.shields.io/badge/kvist_0.1.0_contract-1_clauses_failed-red)\n"
            )
        else:
            assert "CM-13 Scopes never share: test_one" in printed
            assert f"change: {clauses()['CM-13'].change.split(',')[0]}" in printed
            assert "0 passed, 1 failed, 0 not applicable" in printed
            # What was not tried for one reason is one row.
            assert "12 clauses" in printed and "20 clauses" in printed and "CM-02" not in printed
    other = tmp_path / "other"
    other.mkdir()
    (other / "test_other.py").write_text("import pytest\n@pytest.mark.clause('CM-13')\ndef test_one(): pass\n")
    command("odd", other)
    assert "For a README: ![1 clauses passed" in capsys.readouterr().out


def test_without_pytest_there_is_a_hint():
    script = (
        "import sys; sys.modules['pytest'] = None\n"
        "from kvist.errors import PluginError\nfrom kvist.testing.conform_command import command\n"
        "try: command('builtin')\nexcept PluginError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "the kit needs pytest\nhint: pip install 'kvist[testing]'\n"


@pytest.mark.slow
def test_the_built_ins_conform(tmp_path):
    """In a process of its own, with the core's metadata as an installer would write it now."""
    project = tomllib.loads((CORE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"kvist-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: kvist\nVersion: {project['version']}\n")
    groups = {name: points for name, points in project["entry-points"].items() if name != "pytest11"}
    text = "".join(f"[{n}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for n, points in groups.items())
    (info / "entry_points.txt").write_text(text)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ran = subprocess.run(
        [sys.executable, "-m", "kvist", "conform", "builtin", "--json"], env=environ, capture_output=True, text=True
    )
    told = json.loads(ran.stdout)
    wrong = [clause for clause in told["clauses"] if clause["status"] not in ("passed", "not applicable")]
    assert {clause["number"] for clause in wrong if clause["status"] == "failed"} == set()
    assert told["conforms"] and ran.returncode == 0
    assert all(
        clause["status"] == "passed"
        for clause in told["clauses"]
        if clause["number"] >= "CM-07" and clause["number"] < "PL"
    )
