"""Every dialect of drafts: what is the same draft loads as the same, and no setting is ignored."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import plain_draft
import pytest
from loading import DRAFTS, TARGET_OF, TARGETS, change, draft, drop, edited, expected, put, target, tensors_of

from eagle3_jax.api import propose, score_draft
from eagle3_jax.checkpoint.drafts import Draft, load_draft
from eagle3_jax.errors import Eagle3Error

A, B, C, D, E, F = (DRAFTS / name for name in TARGET_OF)
each_draft = pytest.mark.parametrize("name", TARGET_OF)
Renamer = Callable[[str], str]


def same(loaded: Draft, original: Draft) -> None:
    assert loaded.model == original.model
    assert jax.tree.structure(loaded.params) == jax.tree.structure(original.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, original.params)


def renamed(rename: Renamer) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({rename(name): tensors.pop(name) for name in list(tensors)})


def refused(folder: Path, match: str, on: str = "llama_tied") -> None:
    with pytest.raises(Eagle3Error, match=match):
        load_draft(folder, target(on))


# No field is ignored: under each wrong reading the logits move as far as the reference's own moved.


def extend_change(loaded: Draft, x: dict[str, np.ndarray], **other: np.ndarray) -> float:
    given = {**x, **other}
    logits = score_draft(loaded, given["features"], given["next_ids"])
    return float(np.max(np.abs(np.asarray(logits) - x["logits"])))


def chain_change(loaded: Draft, x: dict[str, np.ndarray]) -> float:
    n = int(x["chain_prefix"][0])
    logits = propose(loaded, x["features"][:, :n], x["next_ids"][:, :n], 4)[1]
    return float(np.max(np.abs(np.asarray(logits) - x["chain_logits"][0])))


@each_draft
def test_every_wrong_reading_changes_the_logits(name: str, tmp_path: Path) -> None:
    folder, on = DRAFTS / name, target(TARGET_OF[name])
    x, theirs = expected(folder), expected(TARGETS / TARGET_OF[name])
    fixture, taps = json.loads((folder / "fixture.json").read_text()), draft(name).model.config.taps
    early = np.concatenate([theirs["hs"][k - 1] for k in taps], axis=-1)
    reversed_taps = np.concatenate(np.split(x["features"], 3, axis=-1)[::-1], axis=-1)

    def under(**overrides: Any) -> Draft:
        return load_draft(folder, on, overrides)

    exact: dict[str, Callable[[], float]] = {
        "norm_before_residual flipped": lambda: extend_change(
            under(norm_before_residual=not fixture["norm_before_residual"]), x
        ),
        "rope theta of the target": lambda: extend_change(under(rope_theta=on.model.config.rope.theta), x),
        "aux order reversed": lambda: extend_change(draft(name), x, features=reversed_taps),
        "taps one layer early": lambda: extend_change(draft(name), x, features=early),
        "tokens not shifted": lambda: extend_change(draft(name), x, next_ids=theirs["input_ids"]),
        "target embedding used": lambda: extend_change(under(embedding="target"), x),
    }
    seen = 0
    for reading, by in fixture["sensitivity"].items():
        if name == "f_speculators_qwen3" and reading == "rope theta of the target":
            assert extend_change(under(rope_theta=10000.0), x) > 0.1  # the two have the same base
        elif reading in exact:
            assert abs(exact[reading]() - by) < 2e-3, reading
        elif reading == "norm_output flipped (chain)":
            assert chain_change(under(norm_output=not fixture["norm_output"]), x) > 0.1, reading
        elif reading == "d2t ignored (chain)":
            # The first draft's own id, fed back as if it were the target's: so it is never fed back.
            ids = np.asarray(draft(name).params["target_ids"])
            assert np.any(ids != np.arange(len(ids)))
            np.testing.assert_array_equal(ids[x["chain_draft_ids"]], x["chain_tokens"])
        elif reading == "fc_norm skipped":
            skipped = edited(
                folder,
                tmp_path / "fc_norm",
                lambda tensors: [tensors.pop(key) for key in list(tensors) if "fc_norm" in key],
                put("fc_norm", False),
            )
            assert abs(extend_change(load_draft(skipped, on), x) - by) < 2e-3
        else:
            tensor = reading.removeprefix("norm := 1 ")
            stored = tensor if tensor in tensors_of(folder) else tensor.replace("midlayer", "layers.0")
            ones = edited(folder, tmp_path / tensor, change(stored, np.ones_like))
            assert extend_change(load_draft(ones, on), x) > 0.1, reading
        seen += 1
    assert seen == len(fixture["sensitivity"]) >= 10


# One draft in many spellings


SPELLINGS: dict[str, Renamer] = {
    "vLLM": lambda name: name.replace("midlayer.", "layers.0."),
    "NeMo": lambda name: name if name == "lm_head.weight" else "model." + name.replace("midlayer.", "layers.0."),
    "TensorRT-LLM, several layers": lambda name: name.replace("midlayer.", "midlayer.0."),
    "all prefixed": lambda name: f"model.{name}",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_of_tensors(spelling: str, tmp_path: Path) -> None:
    loaded = load_draft(edited(A, tmp_path, renamed(SPELLINGS[spelling])), target("llama_tied"))
    same(loaded, draft("a_safeailab"))
    assert loaded.dialect == ("safeailab" if "midlayer" in SPELLINGS[spelling]("midlayer.") else "vllm")


def test_the_nested_config_of_speculators(tmp_path: Path) -> None:
    def nest(config: dict) -> None:
        outer = {name: config.pop(name) for name in ("architectures", "draft_vocab_size")}
        inner = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        config.clear()
        config.update(outer, speculators_model_type="eagle3", transformer_layer_config=inner)
        config.update(architectures=["Eagle3Speculator"], eagle_aux_hidden_state_layer_ids=None)
        config.update(norm_before_residual=False, speculators_version="0.1.0.dev14")

    folder = edited(A, tmp_path, renamed(SPELLINGS["vLLM"]), nest)
    loaded = load_draft(folder, target("llama_tied"))
    same(loaded, draft("a_safeailab"))
    assert (loaded.dialect, loaded.tap_convention) == ("speculators", "default")


def test_names_from_before_fc_norm(tmp_path: Path) -> None:
    old = {f"fc_norm.{i}.weight": f"aux_norm_{level}.weight" for i, level in enumerate(("low", "mid", "high"))}

    def use_old(config: dict) -> None:
        config["use_aux_norm"] = config.pop("fc_norm")

    folder = edited(C, tmp_path / "c", renamed(lambda name: old.get(name, name)), use_old)
    same(load_draft(folder, target("llama_gqa_rope3")), draft("c_eagle31"))
    silent = edited(C, tmp_path / "d", config=drop("fc_norm"))
    same(load_draft(silent, target("llama_gqa_rope3")), draft("c_eagle31"))


def test_rope_is_looked_up_in_both_places(tmp_path: Path) -> None:
    def base(**fields: Any) -> float:
        folder = edited(D, tmp_path, config=lambda c: (c.pop("rope_theta"), c.pop("rope_scaling"), c.update(fields)))
        return load_draft(folder, target("llama_tied")).model.config.rope.theta

    assert base() == 10000.0
    assert base(rope_theta=5e5) == 5e5
    assert base(rope_parameters={"rope_theta": 7e5, "rope_type": "default"}) == 7e5
    assert base(rope_parameters={"rope_theta": 7e5}, rope_theta=5e5) == 7e5
    assert any("the latter is used" in w for w in load_draft(tmp_path, target("llama_tied")).warnings)


# Speculators' settings


def inner(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["transformer_layer_config"].update({name: value})


def proposals(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["speculators_config"].update(fields)


def test_a_missing_norm_before_residual_is_true_for_speculators(tmp_path: Path) -> None:
    loaded = load_draft(edited(F, tmp_path, config=drop("norm_before_residual")), target("llama_gqa_rope3"))
    assert loaded.model.config.norm_before_residual
    assert "norm_before_residual is missing" in loaded.warnings[0]
    told = load_draft(tmp_path, target("llama_gqa_rope3"), {"norm_before_residual": False})
    same(told, draft("f_speculators_qwen3"))


SPECULATORS_FAULTS = {
    "another algorithm": (put("speculators_model_type", "dflash"), "'dflash'; only eagle3"),
    "algorithm": (proposals(algorithm="eagle"), "algorithm is 'eagle'"),
    "no inner config": (put("transformer_layer_config", None), "transformer_layer_config is None"),
    "inner kind": (inner("model_type", "gemma3"), "of type 'gemma3' is not supported; llama and qwen3 are"),
    "said twice": (inner("draft_vocab_size", 20), "draft_vocab_size is 40, but 20"),
    "unknown outer norm": (put("norm_everything", True), "norm_everything may change the result"),
    "unknown inner norm": (inner("norm_everything", True), "norm_everything may change the result"),
    "choice of proposals": (
        proposals(default_proposal_method="tree"),
        r"default_proposal_method is 'tree'; one of \['greedy'\]",
    ),
    "no choice": (
        proposals(proposal_methods=[{"proposal_type": "a"}, {"proposal_type": "b"}], default_proposal_method=None),
        "default_proposal_method is None",
    ),
    "window": (inner("layer_types", ["sliding_attention"]), "layer_types"),
    "two layers": (inner("num_hidden_layers", 2), "num_hidden_layers is 2"),
    "architecture": (put("architectures", ["LlamaForCausalLM"]), "Eagle3Speculator, Eagle3DraftModel are"),
}


@pytest.mark.parametrize("fault", SPECULATORS_FAULTS)
def test_faulty_speculators_configs_are_refused(fault: str, tmp_path: Path) -> None:
    edit, match = SPECULATORS_FAULTS[fault]
    refused(edited(F, tmp_path, config=edit), match, "llama_gqa_rope3")


def test_one_of_several_proposals_may_be_the_default(tmp_path: Path) -> None:
    several = [{"proposal_type": "tree"}, {"proposal_type": "greedy", "speculative_tokens": 5}]
    folder = edited(F, tmp_path, config=proposals(proposal_methods=several))
    same(load_draft(folder, target("llama_gqa_rope3")), draft("f_speculators_qwen3"))


# Several layers, and no fc, against the plain restatement


def flat(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("transformer_layer_config", {})}
    return {**config, "rope_theta": config.get("rope_parameters", config).get("rope_theta", 10000.0)}


def embedding_of(folder: Path, on: str) -> np.ndarray:
    own = tensors_of(folder).get("embed_tokens.weight")
    return tensors_of(TARGETS / on)["model.embed_tokens.weight"] if own is None else own


def plain_logits(folder: Path, g: np.ndarray, next_ids: np.ndarray, on: str) -> np.ndarray:
    tensors = {name.replace("midlayer", "layers.0"): value for name, value in tensors_of(folder).items()}
    y = plain_draft.hidden(tensors, flat(folder), g, next_ids, embedding_of(folder, on))
    return plain_draft.logits(tensors, flat(folder), y)


@pytest.mark.parametrize("name", ["b_speculators", "f_speculators_qwen3"])
def test_the_restatement_is_right(name: str) -> None:
    folder, x = DRAFTS / name, expected(DRAFTS / name)
    g = plain_draft.fused(tensors_of(folder), flat(folder), x["features"][1])
    np.testing.assert_allclose(plain_logits(folder, g, x["next_ids"][1], TARGET_OF[name]), x["logits"][1], atol=1e-4)


@pytest.mark.parametrize("norm_name", ["input_layernorm", "hidden_norm"])
def test_layers_after_the_first(norm_name: str, tmp_path: Path) -> None:
    """A draft of two layers: its logits, and its chain, whose second layer has a cache of its own."""
    rng, width, x = np.random.default_rng(3), 40, expected(F)

    def add(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            shape = list(tensors[name].shape)
            if shape[-1] == 2 * width:  # only the first layer reads the embedding
                shape[-1] = width
            scale = 0.2 if len(shape) == 2 else 1.0
            values = scale * rng.normal(size=shape) if len(shape) == 2 else rng.uniform(0.5, 1.5, shape)
            tensors[name.replace("layers.0.", "layers.1.")] = values.astype(np.float32)
        before = [tensors.pop(f"layers.1.{name}.weight") for name in ("input_layernorm", "hidden_norm")]
        tensors[f"layers.1.{norm_name}.weight"] = before[0]

    folder = edited(F, tmp_path, add, inner("num_hidden_layers", 2))
    loaded = load_draft(folder, target("llama_gqa_rope3"))
    assert loaded.model.config.num_layers == 2
    n, tensors, config = 9, tensors_of(folder), flat(folder)
    ids, logits = propose(loaded, x["features"][:, :n], x["next_ids"][:, :n], 4)
    assert np.abs(logits[:, 0] - x["logits"][:, n - 1]).max() > 0.1

    g, tokens = plain_draft.fused(tensors, config, x["features"][0, :n]), x["next_ids"][0, :n]
    for step in range(4):
        y = plain_draft.hidden(tensors, config, g, tokens, embedding_of(folder, "llama_gqa_rope3"))
        plain = plain_draft.logits(tensors, config, y[-1])
        np.testing.assert_allclose(logits[0, step], plain, atol=2e-4)
        best = int(np.argmax(plain))
        assert ids[0, step] == best + tensors["d2t"][best]
        g, tokens = np.vstack([g, y[-1:]]), np.append(tokens, ids[0, step])


def test_norms_of_deeper_layers_must_be_one(tmp_path: Path) -> None:
    def both(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "layers.1.")] = tensors[name]

    refused(edited(F, tmp_path, both), "input_layernorm.weight or hidden_norm.weight, not both", "llama_gqa_rope3")


def test_a_draft_without_fc_reads_the_targets_normed_last_hidden_state(tmp_path: Path) -> None:
    folder = edited(D, tmp_path, drop("fc.weight"), put("eagle_config", {"use_aux_hidden_state": False}))
    loaded, on = load_draft(folder, target("llama_tied")), TARGETS / "llama_tied"
    assert (loaded.model.config.taps, loaded.tap_convention) == ((7,), "last")
    theirs, x = expected(on), expected(D)
    logits = score_draft(loaded, theirs["hs"][7], x["next_ids"])
    w, eps = tensors_of(on)["model.norm.weight"], json.loads((on / "config.json").read_text())["rms_norm_eps"]
    normed = plain_draft.norm(theirs["hs"][7, 0].astype(np.float64), w, eps)
    plain = plain_logits(folder, normed, x["next_ids"][0], "llama_tied")
    np.testing.assert_allclose(np.asarray(logits)[0], plain, atol=2e-4)


# Embeddings and maps


def test_an_empty_embedding_is_refused_unless_overridden(tmp_path: Path) -> None:
    folder = edited(D, tmp_path, change("embed_tokens.weight", np.zeros_like))
    refused(folder, "same row for every token")
    assert load_draft(folder, target("llama_tied"), {"embedding": "target"}).model.config.shares_embedding


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        (np.zeros(40, np.int64), "all zeros, as if it had never been filled in"),
        (np.arange(40), "rises from each id to the next, as if it held target ids"),
    ],
)
def test_maps_that_no_builder_writes_are_refused(offsets: np.ndarray, match: str, tmp_path: Path) -> None:
    refused(edited(A, tmp_path, lambda t: (t.pop("t2d"), t.update(d2t=offsets))), match)


def test_a_map_needs_no_other_side(tmp_path: Path) -> None:
    same(load_draft(edited(A, tmp_path, drop("t2d")), target("llama_tied")), draft("a_safeailab"))


# What is said


def test_taps_are_said_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "eagle3_jax"):
        load_draft(C, target("llama_gqa_rope3"))
        load_draft(A, target("llama_tied"))
    assert "taps hs[2, 3, 4] (ids [1, 2, 3] start at 1, as SGLang and SpecForge write them)" in "\n".join(
        caplog.messages
    )
    warning = next(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "no ids in the config: (2, N//2, N-3)" in warning
