"""The hostile cache of ``core/tests/support/gqa_cache.py`` for the tests of this folder."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("gqa_cache", "gqa_backend_cases")

from gqa_cache import make_cache, make_case  # noqa: E402

__all__ = ["make_cache", "make_case"]
