"""Losses, one file per family: [B, T] tensors in, a scalar and its metrics out."""
