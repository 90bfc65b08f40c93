"""Records with tiers below the device: pages in copy, pages down and up, hits by tier."""

from __future__ import annotations

import json

from kvist.iterations.recorder import Iterations
from kvist.manager import Run
from kvist.testing.tier_values import Cache
from kvist.testing.values import tokens


class Written(list):
    """A file that keeps its lines."""

    def write(self, line: bytes) -> None:
        self.append(line)

    def steps(self) -> list[dict]:
        return [line for line in map(json.loads, self) if line["kind"] == "step"]


def test_pages_go_down_and_come_up_and_every_move_is_in_one_record(tmp_path) -> None:
    cache = Cache(device_pages=16, host_pages=4, folder=tmp_path / "disk")
    written = Written()
    iterations = Iterations(cache.manager, file=written)
    tiers = json.loads(written[0])["tiers"]
    assert [(tier["name"], tier["groups"][0]["capacity"]) for tier in tiers] == [
        ("device", 16),
        ("host", 4),
        ("disk", 0),
    ]
    # Four blocks; then four more, for which the host drops the first ones once the disk has them.
    cache.cached(range(1, 17))
    cache.manager.poll()
    iterations.step()
    cache.flush()
    iterations.step()
    cache.cached(range(50, 66))
    cache.flush()
    iterations.step()
    copying, first, second = written.steps()
    assert copying["groups"] == [{"free": 12, "held": 4, "copying": 4, "new": 4}]
    assert copying["lower"][0]["groups"] == [{"used": 4, "copying": 4}]
    assert first["groups"] == [{"free": 12, "cached": 4}]
    assert [tier["groups"] for tier in first["lower"]] == [[{"used": 4, "offloaded": 4}], [{"used": 4, "offloaded": 4}]]
    assert second["lower"][0]["groups"] == [{"used": 4, "offloaded": 4, "dropped": 4}]
    assert second["lower"][1]["groups"] == [{"used": 8, "offloaded": 4}]
    # The device has neither now; one prompt comes from the disk, the other one from the host.
    cache.evict_device()
    iterations.step()
    for start in (50, 1):
        sequence = cache.manager.open(tokens(range(start, start + 17)))
        cache.load(sequence)
        step = cache.manager.plan([Run(sequence, 1)]).commit()
        cache.values.run(step, [sequence], {id(sequence): sequence.tokens})
        cache.manager.complete(step)
        iterations.step(step)
        cache.manager.close(sequence)
    host, disk = written.steps()[-2:]
    assert (host["reused_tokens"], host["lower"][0]["reused_tokens"], host["lower"][0]["groups"][0]["onboarded"]) == (
        16,
        16,
        4,
    )
    assert "reused_tokens" not in host["lower"][1]
    assert (disk["reused_tokens"], disk["lower"][1]["reused_tokens"], disk["lower"][1]["groups"][0]["onboarded"]) == (
        16,
        16,
        4,
    )
    assert "reused_tokens" not in disk["lower"][0]
    # Only the step's own page is new: what came up was there before.
    assert host["groups"][0]["new"] == disk["groups"][0]["new"] == 1
    totals = cache.manager.stats().tiers
    for place, tier in enumerate(totals):
        records = [step["lower"][place] for step in written.steps()]
        (group,) = tier.groups
        for name, total in (("offloaded", group.moved_down), ("onboarded", group.moved_up), ("dropped", group.evicted)):
            assert sum(record["groups"][0].get(name, 0) for record in records) == total
        assert sum(record.get("reused_tokens", 0) for record in records) == tier.reused_tokens
