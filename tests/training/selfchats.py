"""A tiny target, and chats it wrote, shared by the training tests."""

import functools
import tempfile

import loading

from eagle3_jax.checkpoint.targets import Target
from eagle3_jax.training.data import Chat, read_chats
from eagle3_jax.training.distill import ChatFrame, DistillConfig, distill

FRAME = ChatFrame((1, 2, 3), (4, 5))
DISTILL = DistillConfig(chats=100, batch_size=50, max_tokens=40, user_tokens=8, seed=3)


def target() -> Target:
    """The fixture target of 7 layers; 96 tokens, of which 95 ends a text."""
    return loading.target("llama_tied")


@functools.cache
def chats() -> list[Chat]:
    """A hundred chats of at most 40 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        distill(target(), folder, DISTILL, frame=FRAME)
        return read_chats(folder)
