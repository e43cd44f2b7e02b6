"""Prompts in, completions with log-probs out. Knows nothing of rewards or files; the model is passed in."""
