"""Migrate manifests of older schemas, one version at a time; files on disk are not changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Manifest = dict[str, Any]


def _one_to_two(manifest: Manifest) -> Manifest:
    """Schema 1 was written by Orbax: it has no chunk files, no digests and no id of the run."""
    return {**manifest, "run": None, "digest": None, "arrays": "orbax"}


MIGRATIONS: dict[int, Callable[[Manifest], Manifest]] = {1: _one_to_two}
"""By schema: migrates a manifest to the next one."""

SCHEMA = 1 + max(MIGRATIONS)
"""The schema that is written now."""


def migrated(manifest: Manifest) -> Manifest:
    """Migrate a manifest of any known schema to `SCHEMA`; its "written" is the schema on disk."""
    first = manifest["schema"]
    for version in range(first, SCHEMA):
        manifest = {**MIGRATIONS[version](manifest), "schema": version + 1}
    return {**manifest, "written": first}
