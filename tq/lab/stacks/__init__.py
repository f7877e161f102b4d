"""Other people's engines around the same training run, each with a program of at most a screen."""
