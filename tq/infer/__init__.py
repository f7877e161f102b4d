"""Language models after training: a pretrained one, its weights and its key-value cache in few bits."""
