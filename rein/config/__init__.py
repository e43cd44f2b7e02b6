"""Recipes: YAML and key=value in, one frozen Recipe out.

Knows keys, units and defaults; opens no data and no model.
"""
