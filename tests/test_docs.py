"""What the docs say about plugins agrees with the code, and what they show works."""

from __future__ import annotations

import inspect
import json
import re
import typing
from pathlib import Path

import attrs
import pytest
import typer
from typer.testing import CliRunner

from kvist import hookspecs, records
from kvist.iterations import records as lines
from kvist.plugins import discovery, load, plan
from kvist.registry import Registry
from kvist_mamba.families import FAMILIES

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
REFERENCE = (ROOT / "docs" / "reference" / "plugins.md").read_text()


def section(heading: str) -> str:
    return REFERENCE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def code_in_tables(text: str) -> set[str]:
    """Names in backticks in the first column of tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_hooks():
    hooks = {name: inspect.signature(hook) for name, hook in inspect.getmembers(hookspecs) if name.startswith("kvist_")}
    assert code_in_tables(section("Hooks")) == {f"{name}({', '.join(hooks[name].parameters)})" for name in hooks}
    assert f"now `{hookspecs.SPEC_VERSION}`" in section("Hooks")


@pytest.mark.parametrize("kind", [records.CacheManagerInfo, records.AttentionBackendInfo, records.TransceiverInfo])
def test_the_fields_of_the_records(kind):
    (table,) = re.findall(rf"\| `{kind.__name__}` \| \|\n(?:\|.*\n)+", section("Records"))
    assert code_in_tables(table) - {kind.__name__} == {field.name for field in attrs.fields(kind)}


def test_the_statuses_and_variables():
    assert code_in_tables(section("Statuses")) == set(typing.get_args(discovery.Status))
    assert code_in_tables(section("Variables")) == {
        discovery.ALLOW_VARIABLE,
        discovery.DENY_VARIABLE,
        discovery.STRICT_VARIABLE,
    }


def test_the_features_of_the_built_in_backends():
    for entry in Registry(load(plan({}))).attention_backends.values():
        if entry.plugin.name == "builtin":
            assert all(f"`{feature}`" in section("Records") for feature in entry.info.features)


def test_links_between_pages_lead_somewhere():
    for page in DOCS:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page}: {target}"


def test_the_command_of_the_how_to_is_a_command():
    page = (ROOT / "docs" / "how-to" / "write-a-plugin.md").read_text()
    (command,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, typing.Any] = {}
    exec(command, names)
    host = typer.Typer()
    host.command()(names["command"])
    assert CliRunner().invoke(host, ["you", "--loud"]).output == "hello you!\n"


def test_the_scenarios_name_tests_that_exist():
    page = (ROOT / "docs" / "reference" / "scenarios.md").read_text()
    files = [*ROOT.glob("core/tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/test_*.py")]
    there = "\n".join(path.read_text() for path in files)
    for name in re.findall(r"`(test_\w+)`", page):
        assert f"\ndef {name}(" in there, name
    for path in re.findall(r"`((?:core|plugins)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path


def test_the_tutorial_runs_as_it_stands(capsys):
    text = (ROOT / "docs" / "tutorial" / "embed-kvist.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    exec(compile("\n".join(blocks), "embed-kvist.md", "exec"), {"__name__": "tutorial"})
    assert "10000 tokens never fit" in capsys.readouterr().out


def test_the_how_to_on_transfers_runs_as_it_stands(capsys):
    text = (ROOT / "docs" / "how-to" / "move-requests.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), "move-requests.md", "exec"), {"__name__": "transfers"})
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:2]) == ["Receiving done", "Sending done"]
    # Keys and values of 3 blocks of 16 tokens, 2 heads of 8 floats.
    assert lines[2] == f"goes on at token 40 after {2 * 3 * 16 * 2 * 8 * 4} bytes"


def test_the_how_to_on_tiers_runs_as_it_stands(tmp_path, capsys):
    text = (ROOT / "docs" / "how-to" / "use-host-and-disk-tiers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names = {"__name__": "tiers", "folder": tmp_path / "cache"}
    exec(compile("\n".join(blocks), "use-host-and-disk-tiers.md", "exec"), names)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["host", "disk"]


def test_watching_the_cache_runs_as_it_stands(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "how-to" / "watch-the-cache.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    exec(compile("\n".join(blocks), "watch-the-cache.md", "exec"), {"__name__": "how-to"})
    output = capsys.readouterr().out
    assert "2 requests, 66% of their 150 prompt tokens reused" in output
    lines = (tmp_path / "records.jsonl").read_text()
    assert lines in output
    kinds = [json.loads(line)["kind"] for line in lines.splitlines()]
    assert kinds == ["begin", "step", "request", "step", "request", "step", "branches"]


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ("`begin`, first", lines.Begin),
        ("`step`, in `groups`", lines.DeviceGroup),
        ("`step`, in `lower`", lines.LowerTier),
        ("`request`", lines.RequestRecord),
        ("`branches`", lines.BranchRecord),
    ],
)
def test_the_fields_of_lines_of_records(row, record):
    text = (ROOT / "docs" / "how-to" / "watch-the-cache.md").read_text()
    (fields,) = re.findall(rf"^\| {row}.*?\| (.*) \|$", text, re.MULTILINE)
    nested = {lines.Begin: (lines.Tier, lines.Group), lines.LowerTier: (lines.LowerGroup,)}.get(record, ())
    expected = {name for each in (record, *nested) for name in each.__struct_fields__}
    told = set(re.findall(r"`(\w+)`", fields))
    # What these hold is told, or has a row of its own.
    assert expected - {"groups", "capacity_bytes"} <= told <= expected | {"s", "steps", "number", "time"}


def test_wishing_what_stays_runs_as_it_stands():
    text = (ROOT / "docs" / "how-to" / "wish-what-stays.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names = {"__name__": "how-to"}
    exec(compile(block, "wish-what-stays.md", "exec"), names)
    # Without the wish the same requests leave nothing of it.
    manager = names["manager"]
    manager.clear()
    names["serve"]([*names["system"], 200, 201])
    for number in range(20):
        names["serve"]([1000 + number] * 128)
    assert manager.probe([*names["system"], 300]) == 0


def test_running_hybrid_models_runs_as_it_stands():
    text = (ROOT / "docs" / "how-to" / "run-hybrid-models.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names = {"__name__": "how-to"}
    exec(compile(block, "run-hybrid-models.md", "exec"), names)
    assert sorted(names["sizes"]) == ["target/History()", "target/State()"]
    served = re.search(r"eleven more model types: ([^.]*)\.", text)[1]
    assert served.replace("\n", " ").split(", ") == sorted(FAMILIES)
