"""Prompts in, completions with log-probs out. Knows nothing of rewards or files; the model is passed in.

hf is the engine: slots decodes a Llama-shaped model (fused, kv_cache), padded any other; board and sampling
serve both.
"""
