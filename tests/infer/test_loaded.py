"""How long the texts are that a model may be asked for."""

from __future__ import annotations

from types import SimpleNamespace

from jaxscale.errors import RunError
from jaxscale.infer.loaded import trained_length


def _run(seq_len, base=None):
    start = None if base is None else SimpleNamespace(run=base)
    return SimpleNamespace(
        config=SimpleNamespace(seq_len=seq_len, start=start, adapters=None if base is None else "LoRA")
    )


def test_adapters_do_not_shorten_the_texts_that_their_model_knows():
    base = _run(512)
    assert [trained_length(r) for r in (base, _run(128, base), _run(1024, base), _run(64, _run(128, base)))] == [
        512, 512, 1024, 512,
    ]  # fmt: skip


def test_adapters_whose_model_is_gone_have_their_own_length():
    class Gone:
        @property
        def run(self):
            raise RunError("it is gone")

    run = _run(128)
    run.config.start, run.config.adapters = Gone(), "LoRA"
    assert trained_length(run) == 128
