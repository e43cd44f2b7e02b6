"""One verb each; the only place that composes. Stages never import each other: pipeline.py alone lists them."""
