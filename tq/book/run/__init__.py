"""The runner: chapters re-executed, compared with what is committed, promoted."""
