"""Training on real data: a small GPT, corpora, the training loop, and what the quantizer meets inside them."""
