"""A tiny random model with a tokenizer made here, and a server for it on 127.0.0.1 that lives at most two minutes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import openai
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvist_transformers import Engine
from kvist_transformers.serving.server import Server, listen
from kvist_transformers.serving.service import Service
from kvist_transformers.serving.worker import Worker

VOCABULARY = 320
MAX_TOKENS = 512
LIFE_S = 120.0
_CORPUS = ["the twig of the tree grows on a branch of the tree", "a branch bears twigs, a twig bears leaves"] * 4
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tiny_tokenizer() -> Any:
    """Bytes and some merges, so that characters outside ASCII take several tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    inner.train_from_iterator(_CORPUS, trainer)
    assert inner.get_vocab_size() <= VOCABULARY
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", chat_template=_TEMPLATE)


def tiny_model() -> Any:
    """The same weights at each call. Of itself it never ends an answer; the tokenizer has a token for that."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@attrs.define
class Running:
    """A server that runs. model: another copy of its weights, for expected values."""

    url: str
    service: Service
    server: Server
    thread: threading.Thread
    model: Any
    tokenizer: Any

    def client(self, **settings: Any) -> openai.OpenAI:
        """OpenAI's own; it does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **settings)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What transformers itself generates."""
        ids = torch.tensor([prompt])
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return made[0, len(prompt) :].tolist()

    def text(self, tokens: list[int]) -> str:
        """Without what is no whole character at the end."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")

    def settled(self) -> bool:
        """Wait until nothing runs, at most some seconds: whether all pages are free or cached then."""
        for _ in range(500):
            if self.service.worker.in_flight == 0 and self.service.worker.engine.idle:
                break
            time.sleep(0.02)
        engine = self.service.worker.engine
        engine.manager.check()
        stats = engine.manager.stats()
        return engine.idle and stats.open_sequences == 0 and all(group.held == 0 for group in stats.groups)

    def stop(self) -> None:
        """As SIGTERM would. Returns when it has ended."""
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def running(
    *,
    max_in_flight: int = 64,
    drain_s: float = 5.0,
    make: Callable[[Engine], Worker] = Worker,
    model: Any = None,
    **engine: Any,
) -> Iterator[Running]:
    """A server for the time of the block. make: its worker. model: by default the tiny one."""
    tokenizer = tiny_tokenizer()
    model = model or tiny_model()
    settings = {"memory": "2MiB", "max_batch_tokens": 64, "max_sequences": 8, **engine}
    service = Service(make(Engine(model, **settings)), model, tokenizer, name="tiny", max_in_flight=max_in_flight)
    socket = listen("127.0.0.1", 0)
    server = Server(service, drain_s=drain_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    end = threading.Timer(LIFE_S, lambda: setattr(server, "should_exit", True))
    end.daemon = True
    thread.start()
    end.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        made = Running(url, service, server, thread, tiny_model(), tokenizer)
        yield made
        made.stop()
        service.worker.engine.manager.check()
    finally:
        end.cancel()
        server.should_exit = True
        thread.join(60)
        socket.close()
