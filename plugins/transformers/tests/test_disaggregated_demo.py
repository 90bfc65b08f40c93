"""The record and the table of ``kvist demo --disaggregated``, and the demo itself where its weights are."""

from __future__ import annotations

import io
import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvist.transfer.outcome import DONE, Outcome, Status
from kvist_transformers import demo as command
from kvist_transformers.disaggregation import demo
from kvist_transformers.disaggregation.pair import Answered
from kvist_transformers.disaggregation.port import Arrival
from kvist_transformers.models import ModelError, find_gguf


def application():
    app = typer.Typer()
    app.command()(command.command)
    return app


def wave(*, other_tokens: bool = False) -> demo.Wave:
    """Three requests: one that moved, one of which half was there and that did not come, one that ended at once."""
    two = {
        "a": Answered([1, 2], 0.5, 2.0, 8, 0, 1, Arrival(0, 8, 0, 4_000_000, 0.002, DONE)),
        "b": Answered([3], 0.1, 1.0, 4, 4, 1, Arrival(1, 8, 4, 0, 0.0, Outcome(Status.FAILED, "it has ended"))),
        "c": Answered([9], 0.3, 0.3, 2, 0),
    }
    one = {"a": [1, 2], "b": [4] if other_tokens else [3], "c": [9]}
    return demo.Wave({"a": [0] * 8, "b": [0] * 8, "c": [0] * 2}, two, one, 2.0, 1.5)


PLAN = demo.Plan((), "shm", max_new_tokens=2)


def test_the_record_of_a_run():
    found = demo.record([wave()], PLAN, 1, {"prefill": "", "decode": ""})
    assert (found["identical"], found["identical_requests"], found["requests"], found["leaks"]) == (True, 3, 3, {})
    [row] = found["waves"]
    assert row == {
        "requests": 3,
        "identical": 3,
        "prompt_tokens": 18,
        "prefill_reused_tokens": 4,
        "moved_requests": 2,
        "failed_transfers": 1,
        "skipped_tokens": 4,
        "skipped_share": 0.25,
        "moved_bytes": 4_000_000,
        "transfer_ms": 2.0,
        "gb_per_s": 2.0,
        "first_token_ms": 300.0,
        "two_seconds": 2.0,
        "one_seconds": 1.5,
    }
    assert json.loads(json.dumps(found)) == found


def test_the_table_and_the_findings():
    found = demo.record([wave(), wave(other_tokens=True)], PLAN, 2, {"prefill": "", "decode": "3 held pages"})
    console = Console(file=io.StringIO(), width=100)
    console.print(demo.table(found))
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["MB", "sent", "4.0", "4.0"] in shown
    assert ["same", "tokens", "as", "in", "one", "process", "3", "of", "3", "2", "of", "3"] in shown
    assert demo.findings(found)[:2] == [
        "Greedy float32 tokens are [red]DIFFERENT[/red] from those of one process, for 1 of 6 requests.",
        "[red]Left in the decode process: 3 held pages.[/red]",
    ]


def test_a_transport_that_nobody_has():
    result = CliRunner().invoke(application(), ["--disaggregated", "--transport", "pigeon", "--quick"])
    assert result.exit_code == 1
    assert "pigeon" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp"])
def test_the_demo_itself(tmp_path, transport):
    try:
        find_gguf()
    except ModelError as error:
        pytest.skip(str(error))
    path = tmp_path / "demo.json"
    arguments = ["--disaggregated", "--transport", transport, "--quick", "--threads", "1", "--json", str(path)]
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["identical"] and not found["leaks"] and found["requests"] == 6
    first, second = found["waves"]
    assert first["failed_transfers"] == second["failed_transfers"] == 0
    assert 0 < second["moved_bytes"] < first["moved_bytes"]
    assert second["skipped_share"] > 0.8
