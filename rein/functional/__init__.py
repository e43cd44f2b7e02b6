"""The algorithm's mathematics: pure functions of tensors and keyword floats.

Imports torch and itself, nothing else.
"""
