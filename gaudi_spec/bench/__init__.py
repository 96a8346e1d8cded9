"""Measures a pair of models against plain decoding and others' decoding, interleaved."""
