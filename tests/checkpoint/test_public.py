"""The list of public drafts, against what was published of them and against shapes worked out by hand."""

import pytest
from loading import target

from eagle3_jax.checkpoint.dialects import LayerNames
from eagle3_jax.checkpoint.drafts import load_draft
from eagle3_jax.checkpoint.names import HeadRows, abstract_params
from eagle3_jax.checkpoint.public import public_drafts
from eagle3_jax.errors import Eagle3Error
from eagle3_jax.models.eagle3 import Eagle3
from eagle3_jax.quant.weight import named_weights

# H, I, heads, key-value heads, head width as the config has it, V, Vd, layer ids, taps
PUBLISHED = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": (4096, 14336, 32, 8, None, 128256, 32000, None, (2, 16, 29)),
    "nm-testing/EAGLE3-LLaMA3.1-Instruct-8B-converted": (4096, 14336, 32, 8, 128, 128256, 32000, None, (2, 16, 29)),
    "qwen3-8b-eagle3": (4096, 12288, 32, 8, 128, 151936, 32000, None, (2, 18, 33)),
    "qwen3-32b-eagle3": (5120, 25600, 64, 8, 128, 151936, 32000, None, (2, 32, 61)),
    "qwen3-30b-a3b-eagle3.1": (2048, 12288, 32, 4, 128, 151936, 32000, None, (2, 24, 45)),
    "lmsys/Qwen3-235B-A22B-EAGLE3": (4096, 24576, 64, 4, 128, 151936, 32000, [1, 46, 90], (2, 47, 91)),
    "gpt-oss-120b-eagle3": (2880, 17280, 64, 8, 64, 201088, 32000, [1, 17, 33], (2, 18, 34)),
    "nebius/EAGLE3-gpt-oss-20b": (2880, 11520, 64, 8, 64, 201088, 64000, None, (2, 12, 21)),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": (2880, 2880, 64, 8, 64, 201088, 64000, None, (2, 12, 21)),
    "RedHatAI/gemma-4-31B-it-speculator.eagle3": (5376, 21504, 32, 16, 256, 262144, 32000, [2, 30, 57], (2, 30, 57)),
    "lightseekorg/kimi-k2.5-eagle3": (7168, 12288, 64, 64, None, 163840, 163840, [1, 29, 57], (2, 30, 58)),
    "amd/Kimi-K2.5-Eagle3-FP8": (7168, 12288, 64, 64, None, 163840, 163840, [1, 29, 57], (2, 30, 58)),
    "AQ-MedAI/Kimi-K25-eagle3": (7168, 18432, 64, 64, 128, 163840, 32000, [2, 30, 58], (2, 30, 58)),
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": (7168, 18432, 64, 64, 128, 163840, 32000, [2, 30, 58], (2, 30, 58)),
    "deepseek-v3-671b-eagle3": (7168, 40960, 56, 8, None, 129280, 32000, [1, 29, 57], (2, 30, 58)),
    "zjxia/step-3.5-flash-eagle3": (4096, 11264, 64, 8, 64, 128896, 32000, [4, 20, 40], (4, 20, 40)),
}
FIELDS = "hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size draft_vocab_size layer_ids".split()
MLA = """k-l-lambda/Kimi-K2.5-Eagle3 lightseekorg/kimi-k2.6-eagle3.1-mla lightseekorg/kimi-k2.7-coder-eagle3.1-mla
    lightseekorg/kimi-k3-eagle3.1-mla nvidia/Kimi-K2.6-Eagle3 k-l-lambda/kimi-k2.6-eagle3-mla-fp8""".split()
UNKNOWN = {
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": "intermediate_size",
    "nvidia/Llama-3.3-70B-Instruct-Eagle3": "hidden_size",
    "AngelSlim/Qwen3-4B_eagle3": "intermediate_size",
    "RedHatAI/Qwen3-8B-speculator.eagle3": "intermediate_size",
    "RedHatAI/Qwen3-8B-Thinking-speculator.eagle3": "hidden_size",
    "gpt-oss-20b-eagle3": "intermediate_size",
    "nvidia/gpt-oss-120b-Eagle3": "intermediate_size",
    "nvidia/gpt-oss-120b-Eagle3-v2": "hidden_size",
    "thoughtworks/MiniMax-M2.5-Eagle3": "intermediate_size",
    "Lorbus/MiniMax-M2.7-EAGLE3": "intermediate_size",
    "Inferact/MiniMax-M3-EAGLE3": "intermediate_size",
    "amd/MiniMax-M3-EAGLE3.1": "hidden_size",
    "linglingdan/eagle3_for_MiniCPM4": "name the target",
    "longcat-flash-eagle3": "hidden_size",
}


def test_every_draft_is_known_whole_or_known_to_be_unknown() -> None:
    assert public_drafts().keys() == {*PUBLISHED, *MLA, *UNKNOWN}
    for name in MLA[1:]:
        with pytest.raises(Eagle3Error, match="is not known"):
            public_drafts()[name].config()
    for name, what in UNKNOWN.items():
        with pytest.raises(Eagle3Error, match=what):
            public_drafts()[name].config()


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_and_shapes(name: str) -> None:
    *values, taps = PUBLISHED[name]
    known = public_drafts()[name]
    assert [known.fields[field] for field in FIELDS] == values
    assert known.taps().indices == taps
    width, mlp, heads, kv_heads, head, vocab, draft_vocab, _ = values
    head = head or width // heads
    params = abstract_params(Eagle3(known.config()))
    names = LayerNames().key_map()
    found = {names.file_name(path): weight.shape[::-1] for path, weight in named_weights(params).items()}
    expected = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (heads * head, 2 * width),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head, 2 * width),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, heads * head),
        **{f"midlayer.mlp.{x}_proj.weight": (mlp, width) for x in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": (width, mlp),
        **{f"midlayer.{x}.weight": (width,) for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm.weight": (width,),
        "lm_head.weight": (draft_vocab, width),
    }
    if known.fields.get("own_embedding"):
        expected["embed_tokens.weight"] = (vocab, width)
    if known.fields.get("fc_norm"):
        expected |= {f"fc_norm.{i}.weight": (width,) for i in range(3)}
    if known.fields.get("norm_before_fc"):
        expected["input_norm.weight"] = (3 * width,)
    assert found == expected
    assert ("target_ids" in params) == (draft_vocab < vocab)


def test_shapes_of_an_mla_draft() -> None:
    config = public_drafts()[MLA[0]].config()
    assert config.taps == (2, 30, 58) and config.cache_row == (1, 576)
    names = LayerNames("layers.0.", latent=(128, 128)).key_map()
    found = {}
    for path, weight in named_weights(abstract_params(Eagle3(config))).items():
        place = names.place(path)
        shape = place.stored_shape(weight) if isinstance(place, HeadRows) else weight.shape[::-1]
        found[names.file_name(path)] = shape
    attention, width = "layers.0.self_attn.", 7168
    assert found == {
        f"{attention}q_a_proj.weight": (1536, 2 * width),
        f"{attention}q_a_layernorm.weight": (1536,),
        f"{attention}q_b_proj.weight": (64 * 192, 1536),
        f"{attention}kv_a_proj_with_mqa.weight": (576, 2 * width),
        f"{attention}kv_a_layernorm.weight": (512,),
        f"{attention}kv_b_proj.weight": (64 * 256, 512),
        f"{attention}o_proj.weight": (width, 64 * 128),
        **{f"layers.0.mlp.{x}_proj.weight": (18432, width) for x in ("gate", "up")},
        "layers.0.mlp.down_proj.weight": (width, 18432),
        **{f"layers.0.{x}.weight": (width,) for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "fc.weight": (width, 3 * width),
        "norm.weight": (width,),
        "lm_head.weight": (163840, width),
    }


def test_other_known_settings() -> None:
    known = {name: draft.fields for name, draft in public_drafts().items()}
    assert known["yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"]["target_hidden_size"] == 8192
    assert known["yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"]["rope_theta"] is None
    assert known["nvidia/gpt-oss-120b-Eagle3-v2"]["use_aux_hidden_state"] is False
    assert known["linglingdan/eagle3_for_MiniCPM4"]["draft_vocab_size"] == 15000
    assert known["AngelSlim/Qwen3-4B_eagle3"]["head_dim"] == 80
    assert [name for name, fields in known.items() if fields.get("norm_before_fc")] == [
        "RedHatAI/gpt-oss-20b-speculator.eagle3"
    ]
    for name in MLA[1:4]:
        assert known[name]["fc_norm"] and known[name]["norm_output"]


def test_a_public_draft_that_is_not_here_says_how_to_fetch_it() -> None:
    command = r"run: hf download lightseekorg/kimi-k2\.5-eagle3 --local-dir kimi-k2\.5-eagle3, and give that folder"
    with pytest.raises(Eagle3Error, match=command):
        load_draft("lightseekorg/kimi-k2.5-eagle3", target("llama_tied"))
