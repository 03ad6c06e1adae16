"""Where a product of a few rows goes on CPU: XLA's own, or a kernel that somebody registered.

Dimension letters: M rows, K contracting width, N output width.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

TARGET = "eagle3_few_rows"
"""Name of the kernel among XLA's foreign functions."""
AT_ONCE = 16
"""Rows of one call of the kernel."""
MAX_ROWS = {jnp.dtype(jnp.float32): AT_ONCE, jnp.dtype(jnp.bfloat16): 8 * AT_ONCE}
"""Rows up to which the kernel is the faster, by the matrix's dtype: XLA makes a float32 copy of one in bfloat16."""
_used = False


def use(on: bool) -> None:
    """Whether programs call the kernel, which must be registered. All are traced anew where that changes."""
    global _used
    if on != _used:
        jax.clear_caches()
    _used = on


def suited() -> bool:
    """Whether there is one device and that a CPU.

    XLA would gather a matrix that lies on several for a function it knows nothing of.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def in_use() -> bool:
    """Whether programs traced now call the kernel."""
    return _used and suited()


def fits(x: Array, matrix: Array) -> bool:
    """Whether x [..., K] times [K, N] is for the kernel: a few float32 rows, a matrix in float32 or bfloat16."""
    most = MAX_ROWS.get(matrix.dtype, 0) * x.shape[-1]
    return in_use() and x.dtype == jnp.float32 and 0 < x.size <= most and matrix.size > 0


def product(x: Array, matrix: Array) -> Array:
    """[..., K] times [K, N] -> float32 [..., N]: each row's bits are the same alone and among others."""
    rows = x.reshape(-1, x.shape[-1])
    parts = [_product(rows[i : i + AT_ONCE], matrix) for i in range(0, len(rows), AT_ONCE)]
    return jnp.concatenate(parts).reshape(*x.shape[:-1], matrix.shape[1])


@jax.custom_jvp
def _product(rows: Array, matrix: Array) -> Array:
    result = jax.ShapeDtypeStruct((rows.shape[0], matrix.shape[1]), jnp.float32)
    kernel = jax.ffi.ffi_call(TARGET, result, vmap_method="sequential")
    return lax.platform_dependent(rows, matrix, cpu=kernel, default=_dot)


@_product.defjvp
def _tangent(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (rows, matrix), (row_tangent, matrix_tangent) = primals, tangents
    return _product(rows, matrix), _dot(row_tangent, matrix) + _dot(rows, matrix_tangent)


def _dot(rows: Array, matrix: Array) -> Array:
    matrix = matrix.astype(rows.dtype)
    return lax.dot_general(rows, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
