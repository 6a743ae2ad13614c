"""Oracles and comparison helpers: what tests hold the library against."""
