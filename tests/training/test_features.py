"""The cache of the target's states: what it refuses, and that a part of it is never taken for the whole."""

from pathlib import Path

import loading
import numpy as np
import pytest
from training import selfchats

from eagle3_jax.api import quantize
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.layers import apply
from eagle3_jax.training.data import Chat, pack
from eagle3_jax.training.features import FeatureCache, restrict_head


def make_cache(folder: Path) -> FeatureCache:
    return FeatureCache(folder, selfchats.target(), pack(selfchats.chats()[:4], 32), (1, 3, 5))


@pytest.mark.parametrize("name", ["features.f16", "hidden.f16", "argmax.i32"])
def test_a_lost_or_cut_file_is_computed_again(tmp_path: Path, name: str) -> None:
    before = make_cache(tmp_path).get([0, 1])
    file = next(tmp_path.glob(f"*/{name}"))
    file.write_bytes(file.read_bytes()[:-2])
    cut = make_cache(tmp_path).get([0, 1])
    file.unlink()
    lost = make_cache(tmp_path).get([0, 1])
    for again in (cut, lost):
        np.testing.assert_array_equal(again.features, before.features)
        np.testing.assert_array_equal(again.hidden, before.hidden)
        np.testing.assert_array_equal(again.argmax, before.argmax)


def test_tokens_of_another_tokenizer_are_refused_whoever_says_them(tmp_path: Path) -> None:
    chat = Chat(np.array([1, 5000, 2], np.int32), np.array([False, False, True]), 0.0)
    with pytest.raises(Eagle3Error, match="5000"):
        FeatureCache(tmp_path, selfchats.target(), pack([chat], 8), (1, 3, 5))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Eagle3Error, match=r"Not a directory|exists"):
        make_cache(tmp_path / "file")


def test_a_narrow_head_is_restricted_as_its_wide_values() -> None:
    narrow = quantize(loading.target("llama_gqa_rope3"), "ptpc_fp8", exclude=["embed"], activations="wide")
    assert narrow.params["head"]["weight"].format == "fp8_channel"
    ids, hidden = np.array([3, 50, 111]), np.linspace(-1, 1, 80, dtype=np.float32).reshape(1, 2, 40)
    restricted, params = restrict_head(narrow, ids)
    whole = apply(narrow.model, narrow.params, hidden, method="logits")
    np.testing.assert_allclose(restricted.logits(params, hidden), whole[..., ids], atol=1e-5)
