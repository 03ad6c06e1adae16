"""The draft before training: its shape, and weights taken from the target where they fit."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle3_jax.checkpoint.taps import default_taps
from eagle3_jax.config import DecoderConfig, Eagle3Config, RopeConfig
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3, shared_weights
from eagle3_jax.quant.weight import Weight


def draft_config(
    target: DecoderConfig,
    draft_vocab_size: int,
    taps: tuple[int, ...] | None = None,
    intermediate_size: int = 0,
    rope_theta: float = 10000.0,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> Eagle3Config:
    """The shape of a draft whose one layer is like the target's own.

    Args:
        target: the target's config.
        draft_vocab_size: Vd; 0 is the target's vocabulary.
        taps: hidden states to read; None is SafeAILab's (2, N // 2, N - 3) for N layers.
        intermediate_size: width of the MLP; 0 is the target's.
        rope_theta: RoPE base. fc_norm, norm_output: the EAGLE-3.1 toggles.

    Raises:
        Eagle3Error: a tap the target does not have.
    """
    layers = target.num_layers
    taps = default_taps(layers) if taps is None else taps
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > layers:
        raise Eagle3Error(f"taps {list(taps)} must ascend within 0 .. {layers}, the target's hidden states")
    return Eagle3Config(
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        taps=taps,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=rope_theta),
        fc_norm=fc_norm,
        norm_output=norm_output,
    )


def init_draft(
    model: Eagle3, key: Array, target_params: Any, target_ids: np.ndarray, from_target: bool
) -> dict[str, Any]:
    """A draft to start from.

    Args:
        model: the draft. key: of the random weights. target_params: the target's weights.
        target_ids: int32 [Vd], the draft vocabulary.
        from_target: copy what fits: the head's columns, the final norm, the last layer (its q, k and v read
            the feature half of the draft's input), and `fc` as the identity on the highest tap.
    """
    c = model.config
    shared = shared_weights(target_params)
    width = len(c.taps) * c.target_hidden_size
    init = jax.jit(partial(model.init, method="describe"))
    features, token_ids = jnp.zeros((1, 1, width), c.dtype), jnp.zeros((1, 1), jnp.int32)
    params = dict(init(key, features, token_ids, shared)["params"])
    if "target_ids" in params:
        params["target_ids"] = jnp.asarray(target_ids, jnp.int32)
    if from_target:
        columns = shared.head.outputs(jnp.asarray(target_ids)).T
        params["head"] = _filled(params["head"], columns)
        params["final_norm"] = _copied(params["final_norm"], target_params["final_norm"])
        identity = np.zeros((width, c.hidden_size), np.float32)
        identity[-c.hidden_size :] = np.eye(c.hidden_size, dtype=np.float32)
        params["fc"] = _filled(params["fc"], jnp.asarray(identity))
        _copy_layer(params, _last_layer(target_params), c)
    return params


def with_vocabulary(params: Mapping[str, Any], target_params: Any, target_ids: np.ndarray) -> dict[str, Any]:
    """A draft's weights with a head of the target ids int32 [Vd], ascending.

    Columns of tokens that the draft's head has stay as they are; the others are the target's.
    """
    own = _matrix(params["head"]["weight"])
    had = np.asarray(params.get("target_ids", np.arange(own.shape[1])))
    kept = np.isin(target_ids, had)
    head = shared_weights(target_params).head
    columns = head.outputs(jnp.asarray(target_ids)).T.astype(own.dtype)
    columns = columns.at[:, np.flatnonzero(kept)].set(own[:, np.searchsorted(had, target_ids[kept])])
    changed = {**params, "head": _filled(params["head"], columns)}
    if len(target_ids) < head.shape[1]:
        return {**changed, "target_ids": jnp.asarray(target_ids, jnp.int32)}
    return {name: part for name, part in changed.items() if name != "target_ids"}


def _last_layer(target_params: Mapping[str, Any]) -> Any:
    numbers = [int(name.removeprefix("layers_")) for name in target_params if name.startswith("layers_")]
    return target_params[f"layers_{max(numbers)}"]


def _copy_layer(params: dict[str, Any], layer: Any, config: Eagle3Config) -> None:
    """Fill the draft's layer from a target's; attention and MLP of another kind or width stay random.

    Such are latent attention, experts, and weights in a narrow format.
    """
    params["hidden_norm"] = _copied(params["hidden_norm"], layer["attention_norm"])
    params["mlp_norm"] = _copied(params["mlp_norm"], layer["mlp_norm"])
    ours, theirs = dict(params["attention"]), layer["attention"]
    widths = {name: ours[name]["weight"].shape[1] for name in "qkv" if name in ours}
    if len(widths) == 3 and all(_fits(theirs, name, (config.hidden_size, n)) for name, n in widths.items()):
        for name in "qkv":
            random_half = _matrix(ours[name]["weight"])[: config.hidden_size]
            feature_half = _matrix(theirs[name]["weight"]).astype(random_half.dtype)
            ours[name] = _filled(ours[name], jnp.concatenate([random_half, feature_half]))
        if _fits(theirs, "o", ours["o"]["weight"].shape):
            ours["o"] = _copied(ours["o"], theirs["o"])
        params["attention"] = ours
    if all(_fits(layer["mlp"], name, params["mlp"][name]["weight"].shape) for name in params["mlp"]):
        params["mlp"] = {name: _copied(params["mlp"][name], layer["mlp"][name]) for name in params["mlp"]}


def _fits(module: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> bool:
    """Whether a target's module has a plain matrix of this name and shape."""
    weight = module[name]["weight"] if name in module else None
    return weight is not None and weight.scale is None and weight.shape == shape


def _matrix(weight: Weight) -> Array:
    """A matrix as [K, N], a vector as [N]."""
    return weight.value.T if weight.layout == "nk" else weight.value


def _filled(linear: Mapping[str, Any], value: Array) -> dict[str, Any]:
    """A layer's params with another weight, given as [K, N] or [N]; copied: training donates its buffers."""
    weight = linear["weight"]
    stored = value.T if weight.layout == "nk" else value
    return {**linear, "weight": weight.replace(value=jnp.array(stored, weight.value.dtype, copy=True))}


def _copied(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    return _filled(ours, _matrix(theirs["weight"]))
