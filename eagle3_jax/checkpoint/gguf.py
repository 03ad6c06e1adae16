"""GGUF files of Llama-architecture models, under Hugging Face names and in Hugging Face row order.

The optional `gguf` package does the dequantisation.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from eagle3_jax.checkpoint.files import map_file, quote
from eagle3_jax.checkpoint.gguf_header import MAGIC, GGUFTensor, read_header
from eagle3_jax.checkpoint.tensors import TensorSource
from eagle3_jax.errors import Eagle3Error

_CHUNK = 1 << 16  # elements dequantised at a time, so that the library's temporaries stay in cache

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
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
_LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"

_INERT_KEYS = frozenset({"expert_used_count", "rope.scaling.finetuned", "tensor_data_layout"})
"""`llama.*` keys that do not change what a dense model computes."""


class GGUFSource(TensorSource):
    """A Llama-architecture GGUF file, dequantised to float32 one tensor at a time.

    Names are Hugging Face's. GGUF stores the rows of q and k so that RoPE rotates neighbours; here they are
    back in the order in which it rotates halves. `rope_freqs.weight` is a field of `config()`, not a tensor.

    Attributes:
        metadata: the file's key-value pairs; arrays are lists.

    Args:
        path: the file.

    Raises:
        Eagle3Error: the `gguf` package is missing; the file is truncated or malformed; it holds another
            architecture, a tensor a Llama model does not have, or settings that are not supported.

    Example:
        >>> source = GGUFSource("SmolLM2-135M-Instruct.Q4_1.gguf")  # doctest: +SKIP
        >>> source.read("model.layers.0.self_attn.q_proj.weight").shape  # doctest: +SKIP
        (576, 576)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._buffer = map_file(self.path)
        # Before the package is missed: another file does not need it.
        if self._buffer[: len(MAGIC)] != MAGIC:
            raise Eagle3Error(f"{self.path}: not a GGUF file; give a GGUF file or the folder of a checkpoint")
        self._gguf = _import_gguf()
        self.metadata, tensors = read_header(self._buffer, self.path, self._gguf)
        self._fields = _Fields(self.metadata, str(self.path))
        self._fields.check_architecture()
        self._tensors = self._map_names(tensors)
        self._config = self._build_config(tensors)

    def names(self) -> list[str]:
        """Every tensor's Hugging Face name, in the file's order."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise Eagle3Error(f"{self.path}: no tensor for {quote(name)} in this file")
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises Eagle3Error for an unknown name."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        """float32. Raises Eagle3Error for an unknown name."""
        self._tensor(name)
        return np.dtype(np.float32)

    def format(self, name: str) -> str:
        """The GGML type in the file ("Q4_1", "F32"). Raises Eagle3Error for an unknown name."""
        return self._tensor(name).kind.name

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32; F32 ones are read-only views of the file.

        Raises:
            Eagle3Error: unknown name.
        """
        tensor = self._tensor(name)
        raw = np.frombuffer(self._buffer, np.uint8, tensor.nbytes, tensor.begin)
        if heads := self._permuted_heads(name):
            # On the packed bytes: rows are quantised one by one, and no second float32 copy is made.
            half = tensor.shape[0] // heads // 2
            raw = raw.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(-1)
        return self._dequantize(raw, tensor.kind).reshape(tensor.shape)

    def config(self) -> dict[str, Any]:
        """The model as a Hugging Face `LlamaConfig` dict.

        `rope_freq_factors` (head_dim / 2 floats) is there when the file has llama3 factors: the inverse
        frequencies are divided by them.
        """
        return dict(self._config)

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a generation: end of sequence, of turn, of message, as far as the file names them."""
        return self._fields.eos_ids()

    def _dequantize(self, raw: np.ndarray, kind: Any) -> np.ndarray:
        """uint8 [bytes] to float32 [elements]."""
        if kind == self._gguf.GGMLQuantizationType.F32:
            return (raw.copy() if raw.ctypes.data % 4 else raw).view(np.float32)
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        result = np.empty(len(raw) // block_bytes * block, np.float32)
        step = max(_CHUNK // block, 1)
        with np.errstate(all="ignore"):  # infinities are the loader's to refuse, by the tensor's name
            for begin in range(0, len(result) // block, step):
                packed = raw[begin * block_bytes : (begin + step) * block_bytes]
                values = self._gguf.quants.dequantize(packed[None], kind)
                result[begin * block : (begin + step) * block] = values[0]
        return result

    def _permuted_heads(self, name: str) -> int:
        if ".self_attn.q_proj." in name:
            return self._fields.heads
        return self._fields.kv_heads if ".self_attn.k_proj." in name else 0

    def _map_names(self, tensors: Mapping[str, GGUFTensor]) -> dict[str, GGUFTensor]:
        mapped = {}
        for name, tensor in tensors.items():
            if name == _ROPE_FACTORS:
                continue
            hf_name = _hf_name(name, self._fields.layers)
            if hf_name is None:
                raise Eagle3Error(
                    f"{self.path}: tensor {quote(name)} has no place in "
                    f"a dense Llama model of {self._fields.layers} layers"
                )
            mapped[hf_name] = tensor
            heads = self._permuted_heads(hf_name)
            if heads and tensor.shape[0] != heads * self._fields.head_dim:
                raise Eagle3Error(
                    f"{self.path}: tensor {quote(name)} has {tensor.shape[0]} rows; "
                    f"{heads} heads of {self._fields.head_dim} need {heads * self._fields.head_dim}"
                )
            block = self._gguf.GGML_QUANT_SIZES[tensor.kind][0]
            if heads and len(tensor.shape) == 1 and block > 1:
                raise Eagle3Error(f"{self.path}: bias {quote(name)} is {tensor.kind.name}; F32 or F16 is needed")
        return mapped

    def _build_config(self, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
        embedding = self._tensor("model.embed_tokens.weight")
        config = self._fields.config(embedding.shape[0])
        config["tie_word_embeddings"] = "lm_head.weight" not in self._tensors
        biases = {name for name in self._tensors if name.endswith(".bias")}
        config["attention_bias"] = any(".self_attn." in name for name in biases)
        config["mlp_bias"] = any(".mlp." in name for name in biases)
        if factors := tensors.get(_ROPE_FACTORS):
            half = self._fields.head_dim // 2
            if factors.shape != (half,):
                raise Eagle3Error(f"{self.path}: {_ROPE_FACTORS} has shape {factors.shape}; ({half},) is needed")
            raw = np.frombuffer(self._buffer, np.uint8, factors.nbytes, factors.begin)
            config["rope_freq_factors"] = self._dequantize(raw, factors.kind).tolist()
        return config


class _Fields:
    """The `llama.*` and `tokenizer.*` metadata that the weights and the config depend on."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata, self._where, self._read = metadata, where, set[str]()

    def check_architecture(self) -> None:
        architecture = self._metadata.get("general.architecture")
        if architecture != "llama":
            raise Eagle3Error(f"{self._where}: architecture {quote(architecture)} is not supported; llama is")
        kind = self._metadata.get("general.type", "model")
        if kind != "model":
            raise Eagle3Error(f"{self._where}: holds a {quote(kind)}; a whole model is needed")
        if self._metadata.get("split.count", 1) not in (0, 1):
            raise Eagle3Error(f"{self._where}: is one part of a split model; merge it with gguf-split --merge")
        self.layers = self._size("block_count")
        self.hidden = self._size("embedding_length")
        self.heads = self._size("attention.head_count")
        self.kv_heads = self._size("attention.head_count_kv", self.heads)
        self.head_dim = self._size("attention.key_length", self.hidden // self.heads)
        if self.head_dim % 2:
            raise Eagle3Error(f"{self._where}: head size {self.head_dim} is odd; RoPE rotates pairs")

    def config(self, vocab_size: int) -> dict[str, Any]:
        self._expect("attention.value_length", self.head_dim)
        self._expect("rope.dimension_count", self.head_dim)
        self._expect("vocab_size", vocab_size)
        self._expect("expert_count", 0)
        self._expect("use_parallel_residual", False)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._size("context_length"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
        }
        scaling = self._rope_scaling()
        if scaling:
            config["rope_scaling"] = scaling
        if ids := self.eos_ids():
            if max(ids) >= vocab_size:
                raise Eagle3Error(f"{self._where}: stop id {max(ids)} is outside the vocabulary of {vocab_size}")
            config["eos_token_id"] = ids
        own = {key.removeprefix("llama.") for key in self._metadata if key.startswith("llama.")}
        unread = sorted(own - self._read - _INERT_KEYS)
        if unread:
            raise Eagle3Error(f"{self._where}: key llama.{unread[0]} is not supported and may change the result")
        return config

    def eos_ids(self) -> list[int]:
        ids = []
        for kind in ("eos", "eot", "eom"):
            key = f"tokenizer.ggml.{kind}_token_id"
            value = self._metadata.get(key)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value < 2**31:
                raise Eagle3Error(f"{self._where}: {key} is {quote(value)}; a token id is needed")
            ids.append(value)
        return list(dict.fromkeys(ids))

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type")
        self._read.add("rope.scaling.original_context_length")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if kind is None:  # llama.cpp takes a factor without a type as linear
            kind = "none" if factor == 1 else "linear"
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise Eagle3Error(f"{self._where}: rope scaling {quote(kind)} is not supported; linear and yarn are")
        # llama.cpp multiplies its own temperature by these, Hugging Face replaces it: only 1 means the same.
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            self._expect(f"rope.scaling.{key}", 1)
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = self._size("rope.scaling.original_context_length")
        scaling["beta_fast"] = self._number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = self._number("rope.scaling.yarn_beta_slow", 1.0)
        return scaling

    def _get(self, key: str) -> Any:
        self._read.add(key)
        return self._metadata.get(f"llama.{key}")

    def _expect(self, key: str, only: Any) -> None:
        value = self._get(key)
        if value is not None and value != only:
            raise Eagle3Error(f"{self._where}: llama.{key} is {quote(value)}; only {only} is supported here")

    def _bad(self, key: str, value: Any, needed: str) -> Eagle3Error:
        found = "missing" if value is None else quote(value)
        return Eagle3Error(f"{self._where}: llama.{key} is {found}; {needed} is needed")

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one entry per layer, all equal
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 2**31:
            raise self._bad(key, value, "one positive integer")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, float) or not 1e-30 < value < 1e30:
            raise self._bad(key, value, "a positive number")
        return float(str(np.float32(value)))  # the shortest decimal of the stored float32: 1e-05, not 9.99...e-06


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise Eagle3Error('GGUF files need the gguf package; run: pip install "eagle3-jax[gguf]"') from error
    return gguf


def _hf_name(name: str, layers: int) -> str | None:
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None:
        return _TOP_NAMES.get(name)
    layer, part, kind = match.groups()
    if int(layer) >= layers or part not in _LAYER_NAMES:
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
