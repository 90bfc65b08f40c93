"""What the author of a cache manager says about it, and what the scenarios run on because of that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import attrs

from kvist.layout import Group, Layout
from kvist.spec import CacheSpec
from kvist.testing.byte_values import ByteValues
from kvist.testing.engine import Engine
from kvist.testing.mixes import MIXES, OPTIONS, Kind, block_of, layout_of, spec_of
from kvist.testing.outcomes import not_applicable
from kvist.testing.under_test import ManagerUnderTest

#: Tokens per block of the kit's own specs, where any number will do.
BLOCK = 4


class ManagerAuthor:
    """Fill in ``manager``; the others have defaults.

    options: the keyword arguments that the manager's factory takes beside the layout, with the meaning that they have
        for :class:`kvist.manager.PagedCacheManager`. Tests of the others are not applicable.
    """

    options: ClassVar[Collection[str]] = OPTIONS

    def manager(self, layout: Layout, **options: Any) -> ManagerUnderTest:
        """A new manager of the arena that ``layout`` describes. ``options`` are some of those declared.

        It needs the two back doors of :class:`kvist.testing.under_test.ManagerUnderTest`; one without them is wrapped
        or subclassed here.
        """
        raise NotImplementedError(f"{type(self).__name__}.manager: return a new manager for this layout")

    def mixes(self) -> Mapping[str, tuple[Kind, ...]]:
        """The kinds of streams that the manager serves together, by a name for messages: all of the kit's by default.

        A manager for one family names its own, or none beside its :meth:`spec`. Windows of a few tokens are met within
        short sequences, so make them small. What queries of a retention of your own read, say to
        :func:`kvist.testing.reads.reads`.
        """
        return MIXES

    def spec(self) -> CacheSpec | None:
        """A spec of the plugin's own family, small too, on which the scenarios run as well."""
        return None

    # For the kit.

    def streams(self) -> Mapping[str, tuple[Kind, ...]]:
        """Mixes for tests that make specs of their own: the author's; without any, the kinds of streams in its spec."""
        mixes, own = self.mixes(), self.spec()
        if mixes:
            return mixes
        assert own is not None, f"{type(self).__name__}: mixes() names none and spec() is None: nothing can be tried"
        kinds = {
            Kind(stream.retention, stream.tokens_per_row): None for layer in own.layers for stream in layer.streams
        }
        return {"spec()": tuple(kinds)}

    def each(
        self,
        scenario: Callable[[Engine], None],
        *,
        pages: int = 40,
        only: Callable[[Layout], bool] = lambda _: True,
        unless: str = "",
        unequal: bool = False,
        change: Callable[[Layout], Layout] = lambda layout: layout,
        **options: Any,
    ) -> None:
        """Run a scenario on every mix: ``pages`` for each group, every row of every step checked.

        only: on which layouts; ``unless`` says why the test is not applicable if that is none of them. change: what is
        made of these before. unequal: pages of different sizes, as far as the kinds' widths differ.
        """
        self.require(options)
        ran = False
        for name, layout in self.layouts(pages, unequal=unequal):
            if only(layout):
                ran = True
                try:
                    scenario(Engine(self.manager(change(layout), **options), values=ByteValues))
                except Exception as error:
                    # Whatever a manager raises is its failure; where it happened is in the cause.
                    raise AssertionError(f"mix {name!r}: {type(error).__name__}: {error}") from error
        if not ran:
            not_applicable(unless)

    def require(self, options: Collection[str]) -> None:
        """Go on only if the manager takes these options."""
        missing = sorted(set(options) - set(self.options))
        if missing:
            not_applicable(f"the manager does not take {', '.join(missing)}")

    def layouts(self, pages: int, *, unequal: bool = False) -> Iterator[tuple[str, Layout]]:
        """Of every mix, and of the author's spec: ``pages`` of the largest size for each group."""
        for name, kinds in self.mixes().items():
            spec, drafts = spec_of(kinds, block_of(kinds) or BLOCK, unequal=unequal)
            yield name, _room(spec, drafts, pages)
        own = self.spec()
        if own is not None:
            # Scenarios have ids and lengths of their own.
            yield "spec()", _room(attrs.evolve(own, vocab_size=None, max_tokens=None), [], pages)


def _room(spec: CacheSpec, drafts: list[CacheSpec], pages: int) -> Layout:
    groups = layout_of(spec, drafts, 1 << 30).groups
    return layout_of(spec, drafts, (pages * len(groups) + 1) * max(group.page_bytes for group in groups))


def drops(group: Group) -> bool:
    """Does a sequence give up blocks of this group while it runs?"""
    return group.sparse and not group.exact
