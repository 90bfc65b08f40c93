"""Moves caches between processes over UCX. Importing this loads nothing."""

from __future__ import annotations
