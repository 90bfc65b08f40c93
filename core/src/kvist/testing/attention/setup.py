"""Before the first step: layouts, refusals, construction, declared features."""

from __future__ import annotations

import attrs
import pytest
import torch

from kvist.attention.base import BackendContext
from kvist.errors import SpecError, StateError
from kvist.layout import Layout
from kvist.memory.device import DeviceMemory
from kvist.spec import CacheSpec, Layer, RowFormat, Stream
from kvist.testing.attention.author import Author
from kvist.testing.attention.case import Case, total_tokens
from kvist.testing.attention.driver import NAN
from kvist.testing.attention.watch import failure
from kvist.testing.outcomes import not_applicable, undeclared


class SetupTests(Author):
    """What a backend says and does before it gets a step."""

    @pytest.mark.clause("AB-01")
    def test_the_page_layout_is_a_pure_answer(self, case: Case) -> None:
        """Asked twice, also with other specs between, the same tag and bytes."""
        answers = []
        for _ in range(2):
            arrangement = self.backend.page_layout(case.spec)
            parts = [
                arrangement.part_bytes(stream, case.spec.block_tokens // stream.tokens_per_row)
                for layer in case.spec.layers
                for stream in layer.streams
            ]
            answers.append((arrangement.tag, parts))
            for other in self.cases:
                if other.features <= self.features:
                    self.backend.page_layout(other.spec)
        if answers[0] != answers[1]:
            raise failure(case, f"page_layout() answered {answers[0]} and then {answers[1]} for one spec")

    @pytest.mark.clause("AB-02")
    def test_streams_it_does_not_know_are_refused(self, case: Case) -> None:
        """Alone in a layer, or beside the others."""
        first = case.spec.layers[0]
        strange = Stream("no-such-stream", RowFormat((3,), "uint8"), first.streams[0].retention)
        for streams in ((strange,), (*first.streams, strange)):
            spec = attrs.evolve(case.spec, layers=(Layer(first.id, streams),))
            if self._accepts(case, spec):
                raise failure(case, f"a layer with streams {_names(spec)} was accepted, expected a SpecError")

    @pytest.mark.clause("AB-02")
    def test_what_it_accepts_it_can_serve(self, case: Case) -> None:
        """A layer without one of its streams is refused, or else a backend for it can be made."""
        first = case.spec.layers[0]
        for left in first.streams if len(first.streams) > 1 else ():
            layer = Layer(first.id, [stream for stream in first.streams if stream is not left])
            spec = attrs.evolve(case.spec, layers=(layer,))
            if self._accepts(case, spec):
                try:
                    self.backend(BackendContext(self._memory(spec, case.device)))
                except Exception as error:
                    what = f"a layer with streams {_names(spec)} was accepted, but the constructor raised {error!r}"
                    raise failure(case, what) from error

    def _accepts(self, case: Case, spec: CacheSpec) -> bool:
        try:
            self.backend.page_layout(spec)
        except SpecError:
            return False
        except Exception as error:
            raise failure(
                case, f"a layer with streams {_names(spec)} raised {error!r}, expected a SpecError"
            ) from error
        return True

    @pytest.mark.clause("AB-03")
    def test_construction_leaves_the_pages_alone(self, case: Case) -> None:
        """The memory may hold the pages of sequences that others brought."""
        memory = self._memory(case.spec, case.device)
        self.backend(BackendContext(memory))
        if not bool((memory.bytes == NAN).all()):
            raise failure(case, "the constructor changed the memory")

    @pytest.mark.clause("AB-03")
    def test_forward_needs_a_step(self, case: Case) -> None:
        """``forward`` before the first ``begin`` is an error with a name."""
        backend = self.backend(BackendContext(self._memory(case.spec, case.device)))
        layer = case.spec.layers[0]
        inputs = self.dense(case, layer, 1, torch.Generator().manual_seed(0))
        try:
            backend.forward(layer.id, inputs)
        except StateError:
            return
        except Exception as error:
            raise failure(case, f"forward() before begin() raised {error!r}, expected a StateError") from error
        raise failure(case, "forward() before begin() returned something, expected a StateError")

    @pytest.mark.clause("AB-22")
    def test_declared_features_work_and_others_are_not_declared(self, any_case: Case) -> None:
        """A case whose features are declared gives right values; of any other it is remarked when it works."""
        case = any_case
        missing = sorted(case.features - self.features)
        try:
            drive = self.driver(case)
            total = total_tokens(case.spec)
            one, other = drive.open(total), drive.open(total)
            drive.step([(one, total), (other, total // 2)])
            drive.step([(other, 1)])
            drive.step([(other, other.left)])
        except Exception as error:
            if missing:
                not_applicable(f"features {', '.join(missing)}")
            raise failure(case, f"it declares {sorted(case.features)}, but {error}") from error
        if missing:
            undeclared(f"features {', '.join(missing)}")

    @pytest.mark.clause("AB-24")
    def test_serves_its_part_of_a_cache(self, case: Case) -> None:
        """Other layers, and other streams of the same layers, are another backend's; so are other groups."""
        drive = self.driver(case, watch_writes=True, foreign=True)
        total = total_tokens(case.spec)
        drive.play([drive.open(length) for length in (total, total // 2)])

    def _memory(self, spec: CacheSpec, device: str) -> DeviceMemory:
        layout = Layout.build(spec, 1 << 22, self.backend.page_layout(spec))
        memory = DeviceMemory(layout, device)
        memory.bytes.fill_(NAN)
        return memory


def _names(spec: CacheSpec) -> list[str]:
    return [stream.name for layer in spec.layers for stream in layer.streams]
