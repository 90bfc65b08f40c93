"""``kvist replay`` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from toy_traces import branching, line, toy_registry
from typer.testing import CliRunner

import kvist.replay.command as module
from kvist.errors import CapacityError, KvistError, PluginError, SpecError


@pytest.fixture
def replay(monkeypatch):
    """Runs the command with the toy family only, and returns what it printed; errors are raised."""
    registry = toy_registry()
    monkeypatch.setattr(module, "default_registry", lambda: registry)
    monkeypatch.setenv("COLUMNS", "100")
    app = typer.Typer()
    app.command()(module.command)

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture
def config(tmp_path: Path):
    """Writes a model config."""

    def write(**fields: object) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": "toy", **fields}))
        return path

    return write


def test_the_table_and_the_file_say_the_same(replay, config, write_trace, tmp_path):
    trace, out = write_trace(branching(0, 60)), tmp_path / "out.json"
    options = ("--config", config(), "--memory", "160 tokens", "--block-tokens", 4, "--concurrency", 3)
    text = replay(trace, *options, "--ceiling", "--json", out)
    content = json.loads(out.read_text())
    assert content["requests"] == len(content["reused_per_request"]) == 60
    assert content["reused_tokens"] == sum(content["reused_per_request"])
    assert content["hit_rate"] < content["hit_rate_ceiling"]
    assert content["evicted_pages"] == content["groups"][0]["evicted_pages"] > 0
    assert 0 < content["groups"][0]["peak_use"] <= 1
    assert content["groups"][0]["capacity_pages"] == 40
    assert content["groups"][0]["padding_bytes"] == content["groups"][0]["padding_fraction"] == 0
    # Pages of 4 tokens without padding; nothing is kept beside the history.
    assert content["bytes_per_token"] * 4 == content["groups"][0]["page_bytes"]
    assert content["padding_bytes_per_token"] == content["bytes_per_sequence"] == 0
    for part in (
        f"{content['hit_rate']:.2%}",
        f"{content['evicted_pages']:,}",
        "History()",
        "hit rate without eviction",
    ):
        assert part in text
    assert replay(trace, *options, "--requests", 5).count("5, at most 3 at a time") == 1


def test_json_on_standard_output_is_all_there_is(replay, config, write_trace):
    text = replay(write_trace(branching(0, 9)), "--config", config(window=5), "--memory", "1MiB", "--json", "-")
    content = json.loads(text)
    assert [group["name"] for group in content["groups"]] == ["target/History()", "target/Window(tokens=5, sinks=0)"]
    assert content["hit_rate_ceiling"] is None


def test_a_folder_stands_for_its_config(replay, config, write_trace):
    trace = write_trace(branching(0, 5))
    assert "hit rate" in replay(trace, "--config", config().parent, "--memory", "1MiB")


def test_requests_that_the_model_cannot_take_are_told(replay, config, write_trace):
    trace = write_trace([line(40, 1, [1], block_tokens=40), line(30, 9, [2], block_tokens=30)])
    text = replay(trace, "--config", config(max_tokens=32), "--memory", "1MiB")
    assert "1, longer than the model's 32 tokens" in text
    assert "7 tokens" in text


def failure(replay, kind: type[KvistError], *arguments: object) -> str:
    with pytest.raises(kind) as raised:
        replay(*arguments)
    return str(raised.value)


def test_bad_input_is_refused_by_name(replay, config, write_trace, tmp_path):
    trace, good = write_trace(branching(0, 5)), config()
    memory = ("--memory", "1MiB")
    other = tmp_path / "other.json"

    other.write_text('{"model_type": "toi"}')
    assert failure(replay, PluginError, trace, "--config", other, *memory) == (
        "no installed plugin serves model type 'toi'; did you mean 'toy'?\n"
        "hint: served are: toy; install the plugin of its family, or write one"
    )
    hint = "hint: give the config.json of a Hugging Face model, or the folder it lies in"
    other.write_text("{}")
    assert failure(replay, SpecError, trace, "--config", other, *memory) == (
        f"model config {other} has no model_type\n{hint}"
    )
    other.write_text("{")
    assert failure(replay, SpecError, trace, "--config", other, *memory).startswith(
        f"model config {other} is not JSON: Expecting property name"
    )
    nowhere = tmp_path / "nowhere"
    assert failure(replay, SpecError, trace, "--config", nowhere, *memory) == (
        f"cannot read model config {nowhere}: No such file or directory\n{hint}"
    )
    assert failure(replay, KvistError, nowhere, "--config", good, *memory) == (
        f"cannot read trace {nowhere}: No such file or directory\nhint: give the path of a JSON Lines file"
    )
    assert failure(replay, SpecError, trace, "--config", good, "--memory", "much").startswith(
        "'much' is not a memory size\nhint: "
    )
    assert failure(replay, CapacityError, trace, "--config", good, "--memory", "16 tokens").startswith(
        "request 0 of the trace never fits: "
    )
    assert failure(replay, CapacityError, trace, "--config", good, "--memory", "100B").startswith(
        "100 bytes cannot hold one page"
    )
    assert failure(replay, SpecError, trace, "--config", good, *memory, "--dtype", "float3").startswith(
        "unknown row dtype 'float3'\nhint: use one of bfloat16"
    )
    assert failure(replay, KvistError, trace, "--config", good, *memory, "--json", tmp_path) == (
        f"cannot write {tmp_path}: Is a directory"
    )


def test_a_replay_imports_neither_torch_nor_transformers():
    script = (
        "import sys, kvist.replay.command, kvist.replay.engine; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'triton', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_recorded_replay_adds_up_to_its_table(replay, config, write_trace, tmp_path):
    trace, out, records = write_trace(branching(0, 60)), tmp_path / "out.json", tmp_path / "records.jsonl"
    options = ("--config", config(window=5), "--memory", "160 tokens", "--block-tokens", 4, "--concurrency", 3)
    text = replay(trace, *options, "--chunk-tokens", 16, "--json", out, "--record", records)
    assert f"recorded: {records}" in " ".join(text.split())
    content, (begin, *lines) = json.loads(out.read_text()), map(json.loads, records.read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    requests = [line for line in lines if line["kind"] == "request"]
    assert (begin["time_unit"], begin["source"]) == ("steps", "replay of trace.jsonl")
    for number, group in enumerate(content["groups"]):
        assert begin["tiers"][0]["groups"][number]["capacity"] == group["capacity_pages"]
        assert sum(step["groups"][number].get("evicted", 0) for step in steps) == group["evicted_pages"]
        assert max(step["groups"][number].get("held", 0) for step in steps) <= group["peak_held_pages"]
    # The last record is of what came after the last step, and time is counted in steps.
    assert [step["time"] for step in steps[:-1]] == list(range(1, len(steps)))
    assert sum(step.get("rows", 0) == 1 for step in steps) > 0
    assert max(step.get("running", 0) for step in steps) <= content["peak_running"] == 3
    assert sorted(int(request["request"]) for request in requests) == list(range(60))
    for request in requests:
        assert request.get("reused_tokens", 0) == content["reused_per_request"][int(request["request"])]
    assert sum(request.get("generated_tokens", 0) for request in requests) == content["output_tokens"]
    assert sum(request.get("pauses", 0) for request in requests) >= content["preemptions"]
    for request in requests:
        # A token a step, but for those that were paused.
        generated, spent = request.get("generated_tokens", 0), request["decode"]
        assert spent >= generated and request["prefill"] >= 1
    assert lines[-1]["kind"] == "branches"
    # Recording changes nothing.
    plain = tmp_path / "plain.json"
    replay(trace, *options, "--chunk-tokens", 16, "--json", plain)
    timed = ("host_us_per_request", "host_us_per_decode_step", "host_us_per_decode_token")
    again = json.loads(plain.read_text())
    assert {key: content[key] for key in content if key not in timed} == {
        key: again[key] for key in again if key not in timed
    }


def test_records_that_cannot_be_written(replay, config, write_trace, tmp_path):
    with pytest.raises(KvistError) as caught:
        replay(write_trace(branching(0, 3)), "--config", config(), "--memory", "1MiB", "--record", tmp_path)
    assert str(caught.value) == f"cannot write {tmp_path}: Is a directory"
