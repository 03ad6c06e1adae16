"""Frozen, hashable configurations and the strict reading of Hugging Face config.json files."""

from eagle3_jax.config.eagle3 import Eagle3Config as Eagle3Config
from eagle3_jax.config.fields import Fields as Fields
from eagle3_jax.config.fields import check_unknown_fields as check_unknown_fields
from eagle3_jax.config.llama import LlamaConfig as LlamaConfig
from eagle3_jax.config.llama import parse_llama as parse_llama
from eagle3_jax.config.rope import RopeConfig as RopeConfig
from eagle3_jax.config.rope import parse_rope as parse_rope
