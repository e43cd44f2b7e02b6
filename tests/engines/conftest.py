"""The model that engines are tested on."""

import pytest
import torch

from rein.models.actor import Actor, load_actor


@pytest.fixture(scope="module")
def actor(tiny_lm: str) -> Actor:
    """With larger weights, so that answers differ and end at different lengths."""
    made = load_actor(tiny_lm)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25, generator=generator)
    return made
