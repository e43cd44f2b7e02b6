"""Files in, typed rows out: read, check, tokenise, split, batch, cache. Knows tokenizers, but no model."""
