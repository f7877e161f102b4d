"""Whole runs that chapters compare: paired, from a shared start, at GPT-2's sizes, on simulated workers, on ranks."""
