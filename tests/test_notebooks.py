"""The notebooks: each is its text pair, holds no outputs, and runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import loading
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
OWN_DRAFT = str(loading.DRAFTS / "a_safeailab")
each_notebook = pytest.mark.parametrize("name", NAMES)


def test_every_notebook_has_a_pair() -> None:
    assert NAMES == sorted(path.stem for path in FOLDER.glob("*.py")) == ["fp8_draft", "quickstart", "train_a_draft"]


@each_notebook
def test_text_and_notebook_are_the_same(name: str) -> None:
    ours, pair = (jupytext.read(FOLDER / f"{name}.{kind}") for kind in ("ipynb", "py"))
    assert [(cell.cell_type, cell.source) for cell in ours.cells] == [
        (cell.cell_type, cell.source) for cell in pair.cells
    ], f"run: make notebooks ({name})"


@each_notebook
def test_nothing_of_a_machine_is_kept(name: str) -> None:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert "%pip install" in "".join(code[0]["source"])
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def run(name: str, place: Path, **environment: str) -> str:
    """Run a notebook, shortened, as a script: the cells in their order, without the installation."""
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        cwd=place,
        env={
            **os.environ,
            "EAGLE3_JAX_SHORT": "1",
            "MPLBACKEND": "Agg",
            "PYTHONPATH": str(FOLDER.parent),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def own_target(tmp_path: Path) -> str:
    """The folder of a tiny target with a tokenizer and a chat template."""
    folder = loading.edited(loading.TARGETS / "llama_tied", tmp_path / "mine")
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(96)}, unk_token="t6"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "t1 t2 {% for message in messages %}{{ message.content }} t3 {% endfor %}t4"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "t95"}))
    return str(folder)


def test_the_quickstart_runs(own_target: str, tmp_path: Path) -> None:
    printed = run("quickstart", tmp_path, EAGLE3_JAX_TARGET=own_target, EAGLE3_JAX_DRAFT=OWN_DRAFT)
    assert "the same tokens: True" in printed and "tokens a round" in printed


def test_the_training_notebook_runs_for_a_model_of_ones_own(own_target: str, tmp_path: Path) -> None:
    printed = run("train_a_draft", tmp_path, EAGLE3_JAX_TARGET=own_target)
    assert "tokens a round" in printed and "draft taps hidden states (2, 3, 4)" in printed


def test_the_fp8_notebook_runs_for_a_draft_of_ones_own(own_target: str, tmp_path: Path) -> None:
    printed = run("fp8_draft", tmp_path, EAGLE3_JAX_TARGET=own_target, EAGLE3_JAX_DRAFT=OWN_DRAFT)
    # Of float32: a byte each and four a row, or half a byte each and one for 32.
    assert re.findall(r"^(FP8|FP8, head too|MXFP4) +(\d) layers, .* \((0\.\d\d)", printed, re.MULTILINE) == [
        ("FP8", "7", "0.27"),
        ("FP8, head too", "8", "0.27"),
        ("MXFP4", "7", "0.13"),
    ]
    assert "midlayer.mlp.up_proj.weight_scale" in printed and '"fc"' in printed
    changes = re.findall(r"^([\w, ]+?) +\d\.\d{3} tokens a round, [+-]\d\.\d{3} \[", printed, re.MULTILINE)
    assert changes == ["FP8 weights", "FP8", "FP8, head too", "MXFP4"]
