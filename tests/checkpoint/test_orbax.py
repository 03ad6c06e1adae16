"""Targets in Orbax folders."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from loading import DRAFTS, TARGETS, draft, edited, put, target

from eagle3_jax.checkpoint import targets
from eagle3_jax.checkpoint.drafts import load_draft, save_draft
from eagle3_jax.checkpoint.orbax import META_FILE
from eagle3_jax.checkpoint.target_files import save_target_folder
from eagle3_jax.checkpoint.targets import Target, load_target, save_target_orbax
from eagle3_jax.errors import Eagle3Error


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "saved"
    save_target_orbax(target("llama_gqa_rope3"), folder)
    return folder


def assert_equal(a: Target, b: Target) -> None:
    assert a.model == b.model and a.eos_ids == b.eos_ids
    assert jax.tree.structure(a.params) == jax.tree.structure(b.params)
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("name", ["llama_tied", "llama_gqa_rope3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restoring_is_bit_exact(name: str, dtype: str, tmp_path: Path) -> None:
    loaded = load_target(TARGETS / name, dtype)
    save_target_orbax(loaded, tmp_path / "saved")
    assert_equal(load_target(tmp_path / "saved"), loaded)


def test_what_was_saved_off_cpu_keeps_its_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        loaded = load_target(TARGETS / "llama_gqa_rope3", "float32")
        assert loaded.params["head"]["weight"].layout == "nk"
        save_target_orbax(loaded, tmp_path / "saved")
    assert_equal(load_target(tmp_path / "saved"), loaded)


def test_another_dtype_is_cast(saved: Path) -> None:
    assert_equal(load_target(saved, "bfloat16"), load_target(TARGETS / "llama_gqa_rope3", "bfloat16"))


def test_rope_settings_and_stop_ids_survive(tmp_path: Path) -> None:
    def turn(config: dict) -> None:
        config["eos_token_id"] = [9, 4]
        del config["rope_parameters"]
        config["rope_theta"] = 12345.5
        config["rope_scaling"] = {"type": "linear", "factor": 2.5}

    loaded = load_target(edited(TARGETS / "llama_tied", tmp_path / "hf", config=turn))
    assert (loaded.model.config.rope.kind, loaded.eos_ids) == ("linear", (9, 4))
    save_target_orbax(loaded, tmp_path / "saved")
    assert_equal(load_target(tmp_path / "saved"), loaded)


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    import tokenizers

    folder = edited(TARGETS / "llama_tied", tmp_path / "hf", config=put("eos_token_id", None))
    vocab = {chr(97 + i): i for i in range(20)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [])).save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "c"}))
    loaded = load_target(folder)
    assert loaded.tokenizer is not None and loaded.eos_ids == (2,)
    save_target_orbax(loaded, tmp_path / "saved")
    shutil.rmtree(folder)
    again = load_target(tmp_path / "saved")
    assert again.tokenizer is not None and again.eos_ids == (2,)
    assert again.tokenizer.encode_chat([{"role": "user", "content": "bad"}]) == [1, 0, 3]


@pytest.mark.model
def test_a_gguf_tokenizer_survives(tmp_path: Path) -> None:
    loaded = load_target("smollm2-135m", "bfloat16")
    small = Target("s", target("llama_tied").model, target("llama_tied").params, loaded.tokenizer, (2,), loaded.source)
    save_target_orbax(small, tmp_path / "saved")
    again = load_target(tmp_path / "saved")
    assert loaded.tokenizer is not None and again.tokenizer is not None and again.eos_ids == (2,)
    chat = [{"role": "user", "content": "Why 1234 rainbows? é 🌈"}]
    assert again.tokenizer.encode_chat(chat) == loaded.tokenizer.encode_chat(chat)


REFUSALS = """
import sys
from eagle3_jax import Eagle3Error, load_target
for folder in sys.argv[1:]:
    try:
        load_target(folder)
        print("loaded")
    except Eagle3Error as error:
        print(repr(str(error)))
"""


def test_damaged_folders_are_refused(saved: Path, tmp_path: Path) -> None:
    def damaged(name: str) -> Path:
        shutil.copytree(saved, tmp_path / name)
        return tmp_path / name

    no_params, no_data, narrow, shallow, newer = map(damaged, ("no params", "no data", "narrow", "shallow", "newer"))
    shutil.rmtree(no_params / "params")
    for file in (no_data / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:100])
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "intermediate_size": 71}))
    (shallow / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    meta = json.loads((newer / META_FILE).read_text())
    (newer / META_FILE).write_text(json.dumps({**meta, "version": meta["version"] + 1}))
    # In a process of its own: reads that Orbax abandons when another fails complain at any later time.
    folders = [no_params, no_data, narrow, shallow, newer]
    command = [sys.executable, "-c", REFUSALS, *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    wanted = ["Orbax cannot restore"] * 2 + ["Orbax cannot restore.*shape", "Orbax cannot restore", "not a checkpoint"]
    lines = ran.stdout.splitlines()
    assert len(lines) == len(wanted)
    for line, match in zip(lines, wanted, strict=True):
        assert re.search(match, line), line
        assert "\\n" not in line


def test_nan_is_refused(tmp_path: Path) -> None:
    loaded = load_target(TARGETS / "llama_tied")
    norm = loaded.params["final_norm"]["weight"]
    loaded.params["final_norm"]["weight"] = norm.replace(value=norm.value.at[3].set(np.nan))
    save_target_orbax(loaded, tmp_path / "saved")
    with pytest.raises(Eagle3Error, match="weight final_norm/weight holds NaN"):
        load_target(tmp_path / "saved")


def test_an_interrupted_save_leaves_nothing_or_the_old_one(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved, tmp_path / "saved")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(targets, "write_json_atomic", fail)
    for name in ("saved", "new"):
        with pytest.raises(Eagle3Error, match="No space left on device"):
            save_target_orbax(target("llama_tied"), tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert_equal(load_target(tmp_path / "saved"), target("llama_gqa_rope3"))


def test_a_linked_folder_is_replaced_behind_its_link(saved: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    (real / "notes.txt").write_text("mine")
    link.symlink_to(real)
    save_target_orbax(load_target(saved), link)
    assert link.is_symlink() and (real / META_FILE).is_file() and (real / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("left", [META_FILE, "generation_config.json", "tokenizer.json"])
def test_another_targets_files_are_never_read_with_the_new_ones(left: str, saved: Path, tmp_path: Path) -> None:
    """An Orbax folder's weights would be loaded instead of the new ones; another model's stop ids would be used."""
    (tmp_path / left).write_text("{}")
    (tmp_path / "config.json").write_text("old")
    with pytest.raises(Eagle3Error, match=f"has {re.escape(left)}, which would be read with the new files"):
        save_target_folder(load_target(saved), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["config.json", left])
    assert (tmp_path / "config.json").read_text() == "old"


@pytest.mark.parametrize("out", ["", ".", "..", None])
def test_the_working_folder_and_no_folder_are_refused(
    out: str | None, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(Eagle3Error, match=r"names no folder|is or holds the working folder"):
        save_target_orbax(load_target(saved), out)  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]


def test_a_draft_is_no_target_to_save(tmp_path: Path) -> None:
    for save in (save_target_orbax, save_target_folder):
        with pytest.raises(Eagle3Error, match="a Draft is no target to save"):
            save(draft("a_safeailab"), tmp_path / "out")  # pyright: ignore[reportArgumentType]
    with pytest.raises(Eagle3Error, match="a Target is no draft to save"):
        save_draft(target("llama_tied"), tmp_path / "out")  # pyright: ignore[reportArgumentType]
    with pytest.raises(Eagle3Error, match="the target is a str; give what load_target gives"):
        load_draft(DRAFTS / "a_safeailab", str(TARGETS / "llama_tied"))  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "out").exists()
