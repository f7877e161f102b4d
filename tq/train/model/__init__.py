"""What is trained: a small GPT, corpora, the training loop, and snapshots of the tensors inside it."""

from tq.train.model.corpus import Corpus, bits_per_byte, load
from tq.train.model.gpt import GPT, PRESETS, GPTConfig
from tq.train.model.loop import TrainConfig, Trainer, parameter_groups

__all__ = [
    "GPT", "PRESETS", "Corpus", "GPTConfig", "TrainConfig", "Trainer", "bits_per_byte", "load", "parameter_groups",
]  # fmt: skip
