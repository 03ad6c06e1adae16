"""What the target computes for packed rows, cached on disk, and the batches made from it.

Dimension letters: R rows, L tokens of a row, F joined feature width, H the target's width, B rows of a batch,
V vocabulary, Vd draft vocabulary.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jax.sharding import Mesh

from eagle3_jax.checkpoint.files import atomic_file, refusing_io
from eagle3_jax.checkpoint.targets import Target
from eagle3_jax.models.attention import Expand
from eagle3_jax.models.decoder import Decoder
from eagle3_jax.models.eagle3 import shared_weights
from eagle3_jax.models.layers import apply
from eagle3_jax.quant.weight import Weight, formats_of
from eagle3_jax.sharding import shard_batch
from eagle3_jax.training.data import PackedRows, check_vocabulary, loss_mask
from eagle3_jax.training.loss import Batch, most_likely, ttt_attention

FLOAT16_MAX = 65504.0


@struct.dataclass
class Rows:
    """A batch of packed rows with the target's states, as they lie in the cache.

    Attributes:
        tokens, segment_ids: int32 [B, L]. loss_mask: bool [B, L - 1].
        features: float16 [B, L, F], tapped hidden states. hidden: float16 [B, L, H], before the final norm.
        argmax: int32 [B, L], the target's most likely next token.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    features: np.ndarray
    hidden: np.ndarray
    argmax: np.ndarray


@dataclasses.dataclass(frozen=True)
class RestrictedHead:
    """The target's final norm and head at the draft vocabulary's columns: the static part."""

    model: nn.Module

    def logits(self, params: Any, hidden: Array) -> Array:
        """Hidden states before the final norm [..., H] -> float32 [..., Vd]."""
        return apply(self.model, params, hidden, method="logits")


def restrict_head(target: Target, target_ids: np.ndarray) -> tuple[RestrictedHead, Any]:
    """The target's head for the draft vocabulary int32 [Vd] only, and its params."""
    head = shared_weights(target.params).head
    columns = head.outputs(jnp.asarray(target_ids)).T
    weight = Weight(columns, None, head.format if head.scale is None else "f32", "kn", head.axes)
    params = {"final_norm": target.params["final_norm"], "head": {"weight": weight}}
    config = target.model.config
    formats = formats_of(params, config.weights)
    config = dataclasses.replace(config, vocab_size=len(target_ids), tied=False, weights=formats)
    return RestrictedHead(target.model.clone(config=config)), params


def make_batch(rows: Rows, restricted: RestrictedHead, head_params: Any, dtype: str) -> Batch:
    """Line up features, next tokens and targets: rows of L tokens give L - 1 rows to train on."""
    hidden = jnp.asarray(rows.hidden[:, 1:]).astype(dtype)
    return Batch(
        features=jnp.asarray(rows.features[:, :-1]).astype(dtype),
        token_ids=jnp.asarray(rows.tokens[:, 1:]),
        target_logits=lax.stop_gradient(restricted.logits(head_params, hidden)),
        target_argmax=jnp.asarray(rows.argmax[:, 1:]),
        loss_mask=jnp.asarray(rows.loss_mask),
        segment_ids=jnp.asarray(rows.segment_ids[:, :-1]),
    )


@partial(jax.jit, static_argnames=("model", "taps"))
def target_states(
    model: Decoder, params: Any, tokens: Array, segment_ids: Array, positions: Array, taps: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """Run the target over packed rows int32 [B, L].

    Returns:
        Tapped features float16 [B, L, F], last hidden states float16 [B, L, H], argmax int32 [B, L].
    """
    attend = ttt_attention(segment_ids)

    def attend_once(q: Array, k: Array, v: Array | Expand, cache: None, **options: Any) -> tuple[Array, None]:
        return attend(q, k, v, (), **options)[0], cache

    out = apply(model, params, tokens, positions, attend_once, (None,) * model.config.num_layers, taps)

    def best(hidden: Array) -> Array:
        return most_likely(apply(model, params, hidden, method="logits"))

    def narrow(x: Array) -> Array:
        return jnp.clip(x.astype(jnp.float32), -FLOAT16_MAX, FLOAT16_MAX).astype(jnp.float16)

    # Row by row: the logits of a whole batch would be the largest array of the run.
    return narrow(out.features), narrow(out.hidden), lax.map(best, out.hidden)


class FeatureCache:
    """The target's states of packed rows in memory-mapped files, computed when first asked for.

    The files' folder is named after all they depend on, so that other rows, taps or weights never meet them.

    Args:
        folder: where caches live.
        target: the target.
        rows: the packed rows.
        taps: hidden states to keep.
        batch_size: rows of one pass of the target.
        mesh: where the target lies; rows of a pass are split over its "data".
        answers_only: learn the answers, not what comes before them too.

    Attributes:
        name: of the cache's own folder; differs with the rows, the taps and the target.

    Raises:
        Eagle3Error: rows of another tokenizer, or a folder that cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        target: Target,
        rows: PackedRows,
        taps: tuple[int, ...],
        batch_size: int = 4,
        mesh: Mesh | None = None,
        answers_only: bool = True,
    ) -> None:
        self.target, self.rows, self.taps, self.batch_size, self.mesh = target, rows, taps, batch_size, mesh
        check_vocabulary(rows.tokens, target.model.config.vocab_size)
        self.loss_mask = loss_mask(rows, answers_only)
        count, length = rows.tokens.shape
        width = target.model.config.hidden_size
        self.name = _fingerprint(target, rows, taps)
        place = Path(folder) / self.name
        with refusing_io(place):
            place.mkdir(parents=True, exist_ok=True)
            self.features, self.hidden, self.argmax, self.done = _open(
                {
                    place / "features.f16": (np.float16, (count, length, len(taps) * width)),
                    place / "hidden.f16": (np.float16, (count, length, width)),
                    place / "argmax.i32": (np.int32, (count, length)),
                    place / "done.u8": (np.uint8, (count,)),
                }
            )

    def __len__(self) -> int:
        return len(self.rows.tokens)

    def get(self, indices: Sequence[int]) -> Rows:
        """The rows at `indices`, computing those not yet in the cache."""
        missing = [i for i in dict.fromkeys(indices) if not self.done[i]]
        for begin in range(0, len(missing), self.batch_size):
            self._compute(missing[begin : begin + self.batch_size])
        pick = np.asarray(indices)
        return Rows(
            tokens=self.rows.tokens[pick],
            segment_ids=self.rows.segment_ids[pick],
            loss_mask=self.loss_mask[pick],
            features=self.features[pick],
            hidden=self.hidden[pick],
            argmax=self.argmax[pick],
        )

    def _compute(self, indices: list[int]) -> None:
        # Always a full batch, so that one program serves; the repeated rows are written once.
        pick = np.resize(np.asarray(indices), self.batch_size)
        arrays = [getattr(self.rows, name)[pick] for name in ("tokens", "segment_ids", "positions")]
        arrays = shard_batch(arrays, self.mesh)
        states = target_states(self.target.model, self.target.params, *arrays, self.taps)
        for store, value in zip((self.features, self.hidden, self.argmax), states, strict=True):
            store[indices] = np.asarray(value)[: len(indices)]
        self.done[indices] = 1


def _open(files: Mapping[Path, tuple[type, tuple[int, ...]]]) -> list[np.memmap]:
    """Memory-mapped files of zeros, or those that are there already: all of them or none.

    One alone that is new, or of another size, would be zeros that the last file calls done.
    """

    def size(dtype: type, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape)) * np.dtype(dtype).itemsize

    if not all(path.exists() and path.stat().st_size == size(*about) for path, about in files.items()):
        for path, about in files.items():
            # Another process may have the old one mapped: it keeps that one.
            with atomic_file(path) as file:
                file.truncate(size(*about))
    return [np.memmap(path, dtype, "r+", shape=shape) for path, (dtype, shape) in files.items()]


def _fingerprint(target: Target, rows: PackedRows, taps: tuple[int, ...]) -> str:
    """Sixteen hex digits of the rows, taps, model and a sample of its weights."""
    digest = hashlib.sha256(repr((target.model.config, taps, rows.tokens.shape)).encode())
    for array in (rows.tokens, rows.segment_ids):
        digest.update(np.ascontiguousarray(array).tobytes())
    for leaf in jax.tree.leaves(target.params):
        digest.update(np.asarray(leaf.reshape(-1)[:256]).tobytes())
    return digest.hexdigest()[:16]
