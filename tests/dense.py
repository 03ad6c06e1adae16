"""Plain float64 attention over whole sequences: the reference of the cache's and the attention's tests."""

import numpy as np


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One row: queries [T, N, D], keys [L, N/G, D], values [L, N/G, Dv], visible bool [T, L] -> [T, N*Dv].

    A sink [N] is one more score of its head, whose value is zero.
    """
    length, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros((length, heads, v.shape[-1]))
    for t in range(length):
        for n in range(heads):
            keys, values = (x[visible[t], n // group].astype(np.float64) for x in (k, v))
            scores = keys @ q[t, n].astype(np.float64) * (width**-0.5 if scale is None else scale)
            if sinks is not None:
                scores = np.append(scores, sinks[n])
                values = np.concatenate([values, np.zeros((1, v.shape[-1]))])
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ values / weights.sum()
    return out.reshape(length, -1)


def after_prefix(start: int, among_new: np.ndarray) -> np.ndarray:
    """What T new tokens see: all of the prefix, and of each other what bool [T, T] says: [T, start + T]."""
    return np.concatenate([np.ones((len(among_new), start), bool), among_new], axis=1)


def in_window(visible: np.ndarray, window: int | None) -> np.ndarray:
    """Visibility [T, L] of the last T of L consecutive tokens, cut to the last `window` tokens of each."""
    length, keys = visible.shape
    age = np.arange(keys - length, keys)[:, None] - np.arange(keys)
    return visible & (age < (keys if window is None else window))
