"""Adapters that turn a model object into `forward(ids, positions) -> logits` over a slot cache."""
