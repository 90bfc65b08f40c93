"""The reference of the server names what the server has."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
from prometheus_client.parser import text_string_to_metric_families

from kvist.layout import Layout
from kvist.manager import PagedCacheManager
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream
from kvist.stats import TierStats
from kvist_transformers.serving import protocol
from kvist_transformers.serving.metrics import Reading, ServerMetrics
from kvist_transformers.serving.worker import Routes
from kvist_transformers.stats import EngineStats

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "server.md").read_text()


def first_column(text: str) -> set[str]:
    """Names in backticks in the first column of tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_fields_of_requests():
    common, completion, chat = re.split(r"\n\| field of .*\n", section("Fields of both kinds of requests"))
    chat = chat.partition("\nOther fields")[0]
    shared = set(protocol.Body.model_fields)
    assert first_column(common) == shared
    assert first_column(completion) == set(protocol.CompletionBody.model_fields) - shared
    # The table names max_tokens in words.
    assert first_column(chat) | {"max_tokens"} == set(protocol.ChatBody.model_fields) - shared
    assert all(f"`{name}`" in section("Fields of both kinds of requests") for name in protocol._NOT_SERVED)


def test_the_metrics():
    row = RowFormat(shape=(2, 8), dtype="float32")
    spec = CacheSpec((Layer(0, (Stream("kv", row, History()),)),), block_tokens=16, fingerprint="x")
    stats = PagedCacheManager(Layout.build(spec, memory_bytes=1 << 16)).stats()
    stats = attrs.evolve(stats, tiers=(TierStats("host", 0, 0, 0, 0, 0, ()),))
    page = ServerMetrics().text(Reading(stats, EngineStats(), Routes()), 0).decode()
    found = {family.name for family in text_string_to_metric_families(page)}
    found = {name for name in found if not name.endswith("_created")}
    assert first_column(section("Metrics")) == found
