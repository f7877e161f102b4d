"""Other people's engines of inference, each in an environment of its own: what the book's is measured beside."""
