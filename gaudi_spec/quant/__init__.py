"""Quantized weights and caches, for each model apart."""
