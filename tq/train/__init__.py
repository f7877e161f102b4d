"""Training with compressed gradients, optimizer state and activations, on real data."""
