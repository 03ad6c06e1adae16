"""The drafts that come with the package: what they are made of and how large they are."""

from pathlib import Path

import pytest

from eagle3_jax.checkpoint.drafts import open_draft_folder
from eagle3_jax.checkpoint.narrow import stored_bytes
from eagle3_jax.checkpoint.quark import quantize_folder
from eagle3_jax.checkpoint.registry import draft_for, entries

BF16, FP8 = "smollm2-135m-eagle3", "smollm2-135m-eagle3-fp8"


@pytest.fixture(scope="module")
def folders() -> tuple[Path, Path]:
    drafts = entries("draft")
    return drafts[BF16].path(), drafts[FP8].path()


def test_the_fp8_draft_is_the_other_one_quantised(folders: tuple[Path, Path], tmp_path: Path) -> None:
    bf16, fp8 = folders
    quantize_folder(bf16, tmp_path / FP8, "ptpc_fp8")
    names = sorted(path.name for path in fp8.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    for name in names:
        # Not assert a == b: nobody wants to read 18 MB.
        same = (fp8 / name).read_bytes() == (tmp_path / FP8 / name).read_bytes()
        assert same, f"{FP8}/{name} is not made of {BF16} as it is now; run: make fp8-draft"


def test_the_fp8_draft_says_what_it_is_made_of() -> None:
    drafts = entries("draft")
    fields = {name: dict(drafts[name].fields) for name in (BF16, FP8)}
    assert fields[FP8].pop("quantized_from") == BF16 == draft_for("smollm2-135m")
    assert fields[BF16].pop("folder") != fields[FP8].pop("folder")
    assert fields[FP8] == fields[BF16]


def test_sizes(folders: tuple[Path, Path]) -> None:
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    assert max(sizes) < 25e6 and sum(sizes) < 50e6
    found = stored_bytes(open_draft_folder(folders[1]))
    # Codes of half the size, and four bytes a row.
    assert found.ratio is not None and 0.5 < found.ratio <= 0.55
