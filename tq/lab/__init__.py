"""Measuring instruments: time, memory, statistics, other people's quantizers, networks.

What they measure depends on them, so every source hash of a chapter that uses one covers it.
"""
