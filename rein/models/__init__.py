"""Models as Rein uses them: packed rows in, [B, T] tensors out.

Knows nothing of ranks, files of rows or rewards.
"""
