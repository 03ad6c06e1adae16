"""Plain float64 attention over whole sequences: the reference of the cache's and the attention's tests."""

import numpy as np


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """One row: queries [T, N, D], keys and values [L, N/G, D], visible bool [T, L] -> [T, N*D]."""
    length, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros((length, heads, width))
    for t in range(length):
        for n in range(heads):
            keys, values = k[visible[t], n // group], v[visible[t], n // group]
            scores = keys.astype(np.float64) @ q[t, n].astype(np.float64) / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ values.astype(np.float64) / weights.sum()
    return out.reshape(length, heads * width)


def after_prefix(start: int, among_new: np.ndarray) -> np.ndarray:
    """What T new tokens see: all of the prefix, and of each other what bool [T, T] says: [T, start + T]."""
    return np.concatenate([np.ones((len(among_new), start), bool), among_new], axis=1)
