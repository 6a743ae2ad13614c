"""Manifests of older versions, brought up to date one version at a time; files on disk stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Manifest = dict[str, Any]


def _one_to_two(manifest: Manifest) -> Manifest:
    """Schema 1 was written by Orbax: it has no chunks of its own, no digests, and does not say which run it is of."""
    return {**manifest, "run": None, "digest": None, "arrays": "orbax"}


MIGRATIONS: dict[int, Callable[[Manifest], Manifest]] = {1: _one_to_two}
"""By schema, what makes a manifest of it one of the next."""

SCHEMA = 1 + max(MIGRATIONS)
"""What is written now."""


def migrated(manifest: Manifest) -> Manifest:
    """A manifest of any known schema as one of `SCHEMA`; "written" keeps the version it was written in."""
    first = manifest["schema"]
    for version in range(first, SCHEMA):
        manifest = {**MIGRATIONS[version](manifest), "schema": version + 1}
    return {**manifest, "written": first}
