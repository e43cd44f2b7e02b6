"""Rein: train a language model with PPO actor-critic from data you already have."""

__version__ = "0.1.0"
