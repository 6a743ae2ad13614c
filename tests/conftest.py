"""Eight simulated devices, caches that outlive a session, and a fresh config for every test."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import signal
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_OLD_JAX = "compiling for a GPU that is not here needs jax 0.11"
_DEVICES = "--xla_force_host_platform_device_count"
_MOST_MAPS = 25_000  # memory maps of a process; Linux allows 65,530 (vm.max_map_count)


def _prepare_environment() -> None:
    """Has to run before JAX is imported anywhere, hence at the import of this file."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICES not in flags:
        flags = f"{flags} {_DEVICES}=8"
    # Programs here run for milliseconds, so compiling them quickly is what counts. jaxlib 0.10 can emit fusions without
    # MLIR, which compiles in less than half the time; later versions cannot, and would stop at the unknown flag. Those
    # fusions round a fused multiply-add otherwise at the edge of an array than within, so they get none (AVX has none):
    # what is the same on every layout is then the same to the bit.
    quick = "--xla_backend_optimization_level=0 --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        quick += " --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
    os.environ["XLA_FLAGS"] = f"{flags} {quick}".strip()
    defaults = {
        "JAX_PLATFORMS": "cpu",
        # Most of the tests' time is compilation, and most programs are the same as last time.
        "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Compiling for a TPU asks the cloud's metadata server otherwise, and waits where there is none.
        "TPU_SKIP_MDS_QUERY": "1",
        "JAXSCALE_CACHE": str(_ROOT / ".cache"),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


_prepare_environment()


@pytest.fixture(scope="session", autouse=True)
def sound_cache():
    """Also where a test makes its mesh by JAX alone, no program that loses the order of its collectives is cached."""
    from jaxscale.layout.program_cache import compile_reordered_anew  # imports JAX

    assert compile_reordered_anew()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share 2/3`: of the chosen tests the second third, as `.ci/run` asks for by the commit."""
    parser.addoption("--share", default="1/1", metavar="K/N", help="of the chosen tests, run the Kth of N parts")


def pytest_configure(config: pytest.Config) -> None:
    """Under `make test-all` a missing compiler is an error before any test runs."""
    if os.environ.get("JAXSCALE_TEST_ALL") and not hasattr(config, "workerinput"):
        for name in ("tpu_aot", "gpu_aot"):
            reason = _missing_compiler(name)
            if reason and reason != _OLD_JAX:
                raise pytest.UsageError(f"{name}: {reason}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of other shares, and skips what compiles for hardware whose compiler is missing."""
    from tests.truth.long import share

    chosen = share(config.getoption("--share"))
    others = [item for item in items if not chosen(item.nodeid)]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    reasons: dict[str, str | None] = {}
    for item in items:
        for name in ("tpu_aot", "gpu_aot"):
            if item.get_closest_marker(name):
                reason = reasons[name] if name in reasons else reasons.setdefault(name, _missing_compiler(name))
                if reason:
                    item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What is imported stays, so the collector need not look at it again; nor as often as where memory is short."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between two files, compiled programs are dropped where they have become many: `tests.truth.programs` says why."""
    if "jax" in sys.modules and (nextitem is None or nextitem.path != item.path):
        from tests.truth.programs import drop_programs  # imports JAX

        drop_programs(_MOST_MAPS)


def _missing_compiler(name: str) -> str | None:
    import jax

    from pallas_kernels import aot

    if name == "gpu_aot" and jax.__version_info__ < (0, 11):
        return _OLD_JAX
    return aot.why_no_tpu() if name == "tpu_aot" else aot.why_no_gpu()


@pytest.fixture(autouse=True)
def fresh_config():
    """No test sees another's bindings."""
    yield
    config = sys.modules.get("jaxscale.config")  # a test that never imported it has nothing to clear
    if config is not None:
        config.clear()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing the loss takes as long as all steps of most runs. A file that looks at pictures has its own fixture."""
    record = sys.modules.get("jaxscale.train.record")
    if record is not None:
        monkeypatch.setattr(record.Record, "picture", lambda self: None)


@pytest.fixture
def interruptible():
    """SIGINT and SIGTERM act, here and in child processes; a shell has its background jobs ignore SIGINT."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A finished run of a small transformer on eight devices, made once: look, and change nothing."""
    from tests.truth.runs import finish  # imports JAX

    return finish(tmp_path_factory.mktemp("finished"))
