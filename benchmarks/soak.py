"""Mixed load with faults on a server: does everything come back?

    .venv/bin/python benchmarks/soak.py --minutes 30

Starts `kvist serve` in a process of its own and lets clients loose on it: chats of several turns, sampled and greedy,
long and short, of several tenants, streamed and whole; clients that go away in the middle, send half a request, send
nonsense, ask for more than fits, or do not read what they asked for. Before, in between and at the end all clients
pause, and it checks: no page is held, no sequence open, counters agree with each other and with what clients saw,
greedy answers are the same each time, and memory and open files of the process do not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

#: Clients at a time.
CLIENTS = 16
#: Most load between two checks; a short soak has at least four of them.
ROUND_S = 30.0
#: Growth of memory that counts as a leak, beyond the first checks, in which pools and caches fill.
MOST_GROWTH_BYTES = 64 << 20
WORDS = ["twig", "branch", "leaf", "root", "bark", "sap", "bud", "tree", "moss", "fern", "seed", "stem"]


class Server:
    """`kvist serve` as a process."""

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "kvist", "serve", model, "--port", "0", "--name", "soak", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"http://\S+", line)
            if found:
                self.url = found[0]
                break
        else:
            raise SystemExit(f"the server has ended with {self.process.wait()}")
        self.memory = psutil.Process(self.process.pid)

    def stop(self) -> int:
        """By SIGTERM: its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


class Load:
    """Clients, and what they saw."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.errors: list[str] = []
        self.longest_s: dict[str, float] = {}
        self.greedy: dict[str, str] = {}
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self.raw = httpx2.AsyncClient(base_url=url, timeout=120)

    async def run(self, seconds: float) -> None:
        """All clients, each doing one thing after the other."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(CLIENTS)))

    async def close(self) -> None:
        await self.client.close()
        await self.raw.aclose()

    async def _client(self, end: float) -> None:
        kinds = (self._chat, self._chat, self._chat, self._same, self._leave, self._nonsense, self._half, self._idle)
        while time.monotonic() < end:
            kind = self.rng.choice(kinds)
            began = time.monotonic()
            try:
                await kind()
                self.seen[kind.__name__] += 1
            except openai.RateLimitError:
                self.seen["sent away"] += 1
                await asyncio.sleep(0.2)
            except Exception as error:
                self.errors.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            took = time.monotonic() - began
            self.longest_s[kind.__name__] = max(took, self.longest_s.get(kind.__name__, 0.0))

    def _text(self, most: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, most)))

    async def _chat(self) -> None:
        """Some turns of one conversation."""
        rng = self.rng
        tenant = rng.choice(["a", "b", "c"])
        messages: list[Any] = [{"role": "system", "content": f"You know trees. {tenant * 40}"}]
        for _ in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": self._text(20)})
            asked = {
                "model": "soak",
                "messages": messages,
                "max_tokens": rng.randint(1, 24),
                "temperature": rng.choice([0, 0.8]),
                "n": rng.choice([1, 1, 1, 2]),
                "stop": rng.choice([None, "\n\n", ["a", "zz"]]),
                "logprobs": rng.random() < 0.2,
                "extra_body": {"cache_salt": tenant, "priority": rng.randint(-2, 2)},
            }
            if rng.random() < 0.5:
                text = ""
                async for chunk in await self.client.chat.completions.create(**asked, stream=True):
                    if chunk.choices and chunk.choices[0].index == 0:
                        text += chunk.choices[0].delta.content or ""
            else:
                text = (await self.client.chat.completions.create(**asked)).choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})

    async def _same(self) -> None:
        """A greedy question that was answered before has the same answer, whatever else is in the batch."""
        prompt = f"{self.rng.choice(WORDS)} and {self.rng.choice(WORDS)}"
        made = await self.client.completions.create(model="soak", prompt=prompt, max_tokens=12, temperature=0)
        text = made.choices[0].text
        if self.greedy.setdefault(prompt, text) != text:
            self.errors.append(f"{prompt!r} gave {text!r} and before {self.greedy[prompt]!r}")

    async def _leave(self) -> None:
        """Go away while the answer comes, or while nothing has come yet."""
        asked = {"prompt": self._text(40), "max_tokens": 200, "stream": self.rng.random() < 0.7, "n": 2}
        request = self.raw.build_request("POST", "/v1/completions", json=asked)
        try:
            async with asyncio.timeout(self.rng.uniform(0.01, 1.0)):
                answer = await self.raw.send(request, stream=True)
                try:
                    async for _ in answer.aiter_lines():
                        pass
                finally:
                    await answer.aclose()
        except TimeoutError:
            pass

    async def _nonsense(self) -> None:
        """Each is refused in words."""
        bodies: list[tuple[bytes, int]] = [
            (b"{", 400),
            (b"\xff\xfe", 400),
            (b"[]", 400),
            (json.dumps({"prompt": [1 << 20]}).encode(), 400),
            (json.dumps({"prompt": "x" * 200_000}).encode(), 400),
            (json.dumps({"prompt": "x", "max_tokens": 10**6}).encode(), 400),
            (json.dumps({"prompt": "x", "model": "other"}).encode(), 404),
            (json.dumps({"prompt": "x", "temperature": "hot"}).encode(), 400),
        ]
        body, status = self.rng.choice(bodies)
        answer = await self.raw.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        if answer.status_code != status or "message" not in answer.json()["error"]:
            self.errors.append(f"{body[:60]!r} was answered {answer.status_code} {answer.text[:200]}")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        return await asyncio.open_connection(parts.hostname, parts.port)

    async def _half(self) -> None:
        """The beginning of a request, and no end."""
        _, writer = await self._connect()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"[: self.rng.randint(1, 70)]
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def _idle(self) -> None:
        """Ask for much, read nothing, go away."""
        _, writer = await self._connect()
        body = json.dumps({"prompt": self._text(10), "max_tokens": 150, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        await asyncio.sleep(self.rng.uniform(0.1, 1.0))
        writer.transport.abort()

    async def numbers(self) -> dict[str, float]:
        """All metrics, labels behind the name; the sum of the groups' where they are only told apart by group."""
        page = (await self.raw.get("/metrics")).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = [value for label, value in sample.labels.items() if label != "group"]
                key = ":".join([sample.name, *labels])
                found[key] = found.get(key, 0) + sample.value
        return found

    async def settle(self) -> dict[str, float]:
        """Wait until nothing runs, at most a minute."""
        end = time.monotonic() + 60
        while True:
            found = await self.numbers()
            if not found["kvist_requests_in_flight"] and not found["kvist_cache_open_sequences"]:
                return found
            if time.monotonic() > end:
                return found
            await asyncio.sleep(0.1)


def faults(found: dict[str, float], before: dict[str, float] | None) -> list[str]:
    """What is wrong with the numbers of a server that has nothing to do."""
    wrong = []

    def demand(true: bool, what: str) -> None:
        if not true:
            wrong.append(what)

    demand(found["kvist_requests_in_flight"] == 0, f"{found['kvist_requests_in_flight']:.0f} requests are left")
    demand(found["kvist_cache_open_sequences"] == 0, f"{found['kvist_cache_open_sequences']:.0f} sequences are open")
    demand(found["kvist_cache_pages_held"] == 0, f"{found['kvist_cache_pages_held']:.0f} pages are held")
    reused, prompt = found["kvist_cache_reused_tokens_total"], found["kvist_cache_prompt_tokens_total"]
    demand(0 <= reused <= prompt, f"{reused} of {prompt} prompt tokens are reused")
    generated, given = found["kvist_engine_generated_tokens_total"], found["kvist_request_output_tokens_total"]
    # Where prompts are computed in another process, so is the first token.
    agree = given == generated if "kvist_prefill_open" not in found else given >= generated
    demand(agree, f"{generated} tokens were generated and {given} are counted with requests")
    demand(found.get("kvist_prefill_open", 1) == 1, "the prefill process has ended")
    if before is not None:
        fewer = [name for name in before if name.endswith("_total") and found.get(name, 0) < before[name]]
        demand(not fewer, f"counters decreased: {fewer}")
        pages = [one["kvist_cache_pages_free"] + one["kvist_cache_pages_cached"] for one in (before, found)]
        # Of several groups pages have different sizes, and slabs change hands.
        if found["kvist_cache_pages_capacity"] == pages[0]:
            demand(pages[0] == pages[1], f"{pages[0]:.0f} pages were free or cached, {pages[1]:.0f} are")
    return wrong


async def soak(server: Server, minutes: float, seed: int) -> dict[str, Any]:
    """Load and checks in turn. Returns what happened; ``faults`` is empty when all is well."""
    load = Load(server.url, seed)
    wrong: list[str] = []
    memory, files = [], []
    before = await load.settle()
    end = time.monotonic() + 60 * minutes
    while (left := end - time.monotonic()) > 0:
        await load.run(min(ROUND_S, 15 * minutes, left))
        began = time.monotonic()
        found = await load.settle()
        settled_s = time.monotonic() - began
        wrong += faults(found, before)
        before = found
        health = await load.raw.get("/health")
        if health.status_code != 200:
            wrong.append(f"/health says {health.status_code}")
            break
        # Connections that clients have aborted are closed by now; those of this client stay.
        memory.append(server.memory.memory_info().rss)
        files.append(server.memory.num_fds())
        print(
            f"{time.strftime('%H:%M:%S')} {sum(load.seen.values())} done, {len(load.errors)} errors, "
            f"{memory[-1] >> 20} MiB, {files[-1]} files, at rest after {settled_s:.1f} s",
            flush=True,
        )
    await load.close()
    if len(memory) > 4:
        growth = memory[-1] - memory[len(memory) // 4]
        if growth > MOST_GROWTH_BYTES:
            wrong.append(f"memory grew by {growth >> 20} MiB: {[each >> 20 for each in memory]}")
    if max(files) > files[0] + 2 * CLIENTS:
        wrong.append(f"open files grew: {files}")
    return {
        "seen": dict(load.seen),
        "longest_s": {kind: round(seconds, 2) for kind, seconds in load.longest_s.items()},
        "faults": wrong + load.errors,
        "memory_mib": [each >> 20 for each in memory],
        "files": files,
        "requests": {name: value for name, value in before.items() if name.startswith("kvist_requests_total")},
        "routes": {name: value for name, value in before.items() if name.startswith("kvist_routes")},
        "reused_of_prompt": before["kvist_cache_reused_tokens_total"] / before["kvist_cache_prompt_tokens_total"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", default="smollm2", help="as for `kvist serve`")
    parser.add_argument("--memory", default="64MiB", help="of the cache; small enough that pages are short")
    parser.add_argument("--max-waiting", default="24", help="small enough that some clients are sent away")
    parser.add_argument("--max-sequences", default="8")
    parser.add_argument("--dtype", default="float32", help="in short types greedy answers depend on the batch")
    parser.add_argument("--disaggregated", action="store_true", help="with a process that computes prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    how = parser.parse_args()
    server = Server(
        how.model,
        *("--memory", how.memory, "--max-waiting", how.max_waiting),
        *("--max-sequences", how.max_sequences, "--dtype", how.dtype),
        *(("--disaggregated",) if how.disaggregated else ()),
    )
    try:
        found = asyncio.run(soak(server, how.minutes, how.seed))
    finally:
        code = server.stop()
    if code != 0:
        found["faults"].append(f"the server ended with {code}")
    print(json.dumps(found, indent=2))
    if how.json is not None:
        how.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    main()
