"""Frozen, hashable configurations and the strict reading of Hugging Face config.json files."""

from eagle3_jax.config.decoder import MOST_LAYERS as MOST_LAYERS
from eagle3_jax.config.decoder import DecoderConfig as DecoderConfig
from eagle3_jax.config.deepseek import DeepseekConfig as DeepseekConfig
from eagle3_jax.config.deepseek import parse_deepseek_v3 as parse_deepseek_v3
from eagle3_jax.config.deepseek import parse_latent as parse_latent
from eagle3_jax.config.eagle3 import Eagle3Config as Eagle3Config
from eagle3_jax.config.eagle3 import Eagle3LatentConfig as Eagle3LatentConfig
from eagle3_jax.config.fields import Fields as Fields
from eagle3_jax.config.fields import check_unknown_fields as check_unknown_fields
from eagle3_jax.config.gpt_oss import parse_gpt_oss as parse_gpt_oss
from eagle3_jax.config.llama import LlamaConfig as LlamaConfig
from eagle3_jax.config.llama import parse_llama as parse_llama
from eagle3_jax.config.minimax import parse_minimax_m2 as parse_minimax_m2
from eagle3_jax.config.moe import MoEConfig as MoEConfig
from eagle3_jax.config.qwen3 import parse_qwen3 as parse_qwen3
from eagle3_jax.config.qwen3 import parse_qwen3_moe as parse_qwen3_moe
from eagle3_jax.config.rope import RopeConfig as RopeConfig
from eagle3_jax.config.rope import parse_rope as parse_rope
from eagle3_jax.config.rope import parse_rotary_dim as parse_rotary_dim
