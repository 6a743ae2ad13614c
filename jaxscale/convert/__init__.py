"""Checkpoints from and to other programs' formats, and adapters merged into their model."""
