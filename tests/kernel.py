"""The native kernel in tests, which have several devices."""

import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from eagle3_jax.native import build
from eagle3_jax.quant import few_rows


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel, in spite of the tests' several devices."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(few_rows, "suited", lambda: True)
    build._register.cache_clear()
    assert build.use_native_kernels()
    yield
    build.use_native_kernels(False)
    build._register.cache_clear()


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Normal numbers, float32."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]
