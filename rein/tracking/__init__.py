"""Where metrics and words go. Knows nothing of models or data."""
