"""One leaf type for every weight: stored value, optional scales, format, layout, logical axes.

A model declares each weight once, as a `WeightSpec`. `jax.eval_shape` of the model's `init` then is the
description that loading, sharding, quantising and exporting map over.

Dimension letters: E experts, K contracting (input) width, N output width, M rows of activations.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from eagle3_jax.quant import few_rows
from eagle3_jax.quant.activations import fake_quantize
from eagle3_jax.quant.formats import FLOAT_FORMATS, NARROW_FORMATS, check_format
from eagle3_jax.quant.products import narrow_product, product, take_rows


@struct.dataclass
class Weight:
    """A stored weight. A pytree node: `value`, `scale` and `input_scale` are leaves, the rest is static.

    Attributes:
        value: stored elements; [K, N] or [N, K] for a matrix (see `layout`), [N] for a vector. Weights of E
            experts are stacked in front: [E, K, N], [E, N, K], [E, N]. Of a narrow matrix the codes, [N, K] or,
            where several share one element, [N, K / pack].
        scale: multipliers of a narrow matrix's blocks (see `eagle3_jax.quant.formats`), else None.
        format: key of the number format, e.g. "f32" or "fp8_channel".
        layout: "kn" keeps the contracting dimension first, "nk" last (as PyTorch stores it), "n" is a vector.
            Narrow matrices are "nk".
        axes: logical names of the dimensions of `shape`, whatever the layout; a stack's first is "experts".
        input_scale: the calibrated scale of activations "fp8_static", float32 [1] ([E, 1] for a stack), else None.
        activations: how activations are rounded before the product (see `eagle3_jax.quant.activations`).
    """

    value: Array
    scale: Array | None = None
    format: str = struct.field(pytree_node=False, default="f32")
    layout: str = struct.field(pytree_node=False, default="kn")
    axes: tuple[str, ...] = struct.field(pytree_node=False, default=())
    input_scale: Array | None = None
    activations: str = struct.field(pytree_node=False, default="wide")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: (K, N) for a matrix, (N,) for a vector, with E before them for a stack."""
        if self.scale is not None:
            *stack, outputs, items = self.value.shape
            return (*stack, items * NARROW_FORMATS[self.format].pack, outputs)
        return _swapped(self.value.shape) if self.layout == "nk" else self.value.shape

    def expert(self, index: Array | int) -> "Weight":
        """One expert's weight out of a stack: nothing of the other experts is read."""
        one = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self)
        return dataclasses.replace(one, axes=self.axes[1:])

    def matmul(self, x: Array) -> Array:
        """Multiply activations by the weight: [..., K] -> [..., N], accumulated in float32, in x's dtype.

        A narrow weight is used as it is (see `eagle3_jax.quant.products`).
        """
        if self.scale is not None:
            y = narrow_product(x, self.value, self.scale, self.format, self.activations, self.input_scale)
            return y.astype(x.dtype)
        x = fake_quantize(x, self.activations, self.input_scale)
        if self.layout == "kn" and few_rows.fits(x, self.value):
            return few_rows.product(x, self.value)
        value = self.value.astype(x.dtype)
        if self.layout == "nk":
            return product(x, value).astype(x.dtype)
        y = lax.dot_general(x, value, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return y.astype(x.dtype)

    def outputs(self, ids: Array) -> Array:
        """The columns of the [K, N] matrix for output ids: int [...] -> [..., K].

        This is how a tied embedding is looked up from the head's weight. Ids outside [0, N) are clipped.
        """
        if self.scale is not None:
            return take_rows(self.value, self.scale, self.format, ids)
        axis = 0 if self.layout == "nk" else 1
        taken = jnp.take(self.value, ids, axis=axis, mode="clip")
        return taken if axis == 0 else jnp.moveaxis(taken, 0, -1)


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The declaration of one weight: logical shape, format, layout, logical axes.

    Attributes:
        shape: (K, N) for a matrix, (N,) for a vector; (E, K, N) and (E, N) for those of E experts.
        axes: one logical axis name for each dimension of `shape`; the first of a stack is "experts".
        format: number format, a key of `FLOAT_FORMATS` or `NARROW_FORMATS`.
        layout: "kn" or "nk" for a matrix, "n" for a vector.
        fill: constant initial value (norms start at 1); None draws a scaled normal.
        activations: how activations are rounded before the product.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    format: str = "f32"
    layout: str = "kn"
    fill: float | None = None
    activations: str = "wide"

    def init(self, key: Array) -> Weight:
        """A freshly initialised weight; under `jax.eval_shape` it is the abstract description.

        A narrow one is zero: narrow weights are made of wide ones, by `quantize` or when loaded.
        """
        check_format(self.format)
        inputs = None
        if self.activations == "fp8_static":
            inputs = jnp.ones((*self.shape[:-2], 1), jnp.float32)
        if (narrow := NARROW_FORMATS.get(self.format)) is not None:
            shape = _swapped(self.shape)
            value = jnp.zeros(narrow.code_shape(shape), narrow.dtype)
            scale = jnp.ones(narrow.scale_shape(shape), narrow.scale_dtype)
            return Weight(value, scale, self.format, "nk", self.axes, inputs, self.activations)
        dtype = FLOAT_FORMATS[self.format]
        stored = _swapped(self.shape) if self.layout == "nk" else self.shape
        if self.fill is not None:
            value = jnp.full(stored, self.fill, dtype)
        else:
            width = self.shape[-1] if self.layout == "n" else self.shape[-2]
            value = (jax.random.normal(key, stored, jnp.float32) / math.sqrt(width)).astype(dtype)
        return Weight(value, None, self.format, self.layout, self.axes, inputs, self.activations)


@dataclasses.dataclass(frozen=True)
class WeightFormats:
    """Format and layout of every weight of a model; static, hashable, part of the model's config.

    Attributes:
        format: default number format of matrices.
        layout: default layout of matrices.
        vector_format: format of norms and biases.
        exceptions: (weight path, format, layout) for weights stored otherwise; the path is the names of the
            parameter tree joined by "/", e.g. "layers_3/mlp/down/weight".
        activations: (weight path, mode) of weights whose activations are rounded before the product.
    """

    format: str = "f32"
    layout: str = "kn"
    vector_format: str = "f32"
    exceptions: tuple[tuple[str, str, str], ...] = ()
    activations: tuple[tuple[str, str], ...] = ()

    def spec(self, path: str, shape: tuple[int, ...], axes: tuple[str, ...], fill: float | None = None) -> WeightSpec:
        """The declaration of the weight at `path`."""
        mode = next((mode for name, mode in self.activations if name == path), "wide")
        for name, fmt, layout in self.exceptions:
            if name == path:
                return WeightSpec(shape, axes, fmt, layout, fill, mode)
        if len(shape) - (axes[0] == "experts") < 2:
            return WeightSpec(shape, axes, self.vector_format, "n", fill)
        return WeightSpec(shape, axes, self.format, self.layout, fill, mode)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its last two dimensions exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def is_weight(node: Any) -> bool:
    """Whether a tree node is a `Weight`; for `jax.tree.map(..., is_leaf=is_weight)`."""
    return isinstance(node, Weight)


def named_weights(params: Any) -> dict[str, Weight]:
    """The `Weight`s of a parameter tree by path, e.g. "layers_3/attention/q/weight"."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    return {tree_path(keys): leaf for keys, leaf in leaves if is_weight(leaf)}


def tree_path(keys: tuple[Any, ...]) -> str:
    """The keys of a leaf in a parameter tree as one name, joined by "/"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def formats_of(params: Any, formats: WeightFormats) -> WeightFormats:
    """The formats of a tree's weights: `formats` with other exceptions and activations, those of the tree.

    Where weights were quantised or kept narrow, the model's config must say so: its `weights` are what this gives.
    """
    exceptions, activations = [], []
    plain = dataclasses.replace(formats, exceptions=(), activations=())
    for path, weight in named_weights(params).items():
        spec = plain.spec(path, weight.shape, weight.axes)
        if (weight.format, weight.layout) != (spec.format, spec.layout):
            exceptions.append((path, weight.format, weight.layout))
        if weight.activations != "wide":
            activations.append((path, weight.activations))
    return dataclasses.replace(formats, exceptions=tuple(exceptions), activations=tuple(activations))


def weight_bytes(params: Any) -> int:
    """Bytes of all arrays of a parameter tree (works on abstract trees too)."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(params))
