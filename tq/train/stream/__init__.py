"""Training of a model that is larger than memory, layer by layer from files (``tq.train.stream.trainer``)."""

from tq.train.stream.trainer import StreamedTrainer, layer_groups

__all__ = ["StreamedTrainer", "layer_groups"]
