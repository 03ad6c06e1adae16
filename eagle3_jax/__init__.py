"""EAGLE-3 speculative decoding in JAX.

The names below load on first use, so that `import eagle3_jax` is quick and pulls nothing in.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_jax.api import (
        Score,
        dequantize,
        encode,
        encode_ids,
        load_draft,
        propose,
        quantize,
        score,
        score_draft,
    )
    from eagle3_jax.checkpoint.drafts import Draft, save_draft
    from eagle3_jax.checkpoint.targets import Target, load_target, save_target_orbax
    from eagle3_jax.decoding.loop import Generation, generate, speculative_generate, stream
    from eagle3_jax.decoding.request import Chain, GenerationConfig
    from eagle3_jax.decoding.sampling import Sampling, row_keys
    from eagle3_jax.decoding.verify import verify_lossless
    from eagle3_jax.errors import Eagle3Error
    from eagle3_jax.native.build import use_native_kernels

__version__ = "0.1.0.dev0"

_HOMES = {
    "api": (
        "Score",
        "dequantize",
        "encode",
        "encode_ids",
        "load_draft",
        "propose",
        "quantize",
        "score",
        "score_draft",
    ),
    "checkpoint.drafts": ("Draft", "save_draft"),
    "checkpoint.targets": ("Target", "load_target", "save_target_orbax"),
    "decoding.loop": ("Generation", "generate", "speculative_generate", "stream"),
    "decoding.request": ("Chain", "GenerationConfig"),
    "decoding.sampling": ("Sampling", "row_keys"),
    "decoding.verify": ("verify_lossless",),
    "errors": ("Eagle3Error",),
    "native.build": ("use_native_kernels",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Chain",
    "Draft",
    "Eagle3Error",
    "Generation",
    "GenerationConfig",
    "Sampling",
    "Score",
    "Target",
    "__version__",
    "dequantize",
    "encode",
    "encode_ids",
    "generate",
    "load_draft",
    "load_target",
    "propose",
    "quantize",
    "row_keys",
    "save_draft",
    "save_target_orbax",
    "score",
    "score_draft",
    "speculative_generate",
    "stream",
    "use_native_kernels",
    "verify_lossless",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
