"""One verb each; the only place that composes. Stages never import stages: pipeline.py alone lists them."""
