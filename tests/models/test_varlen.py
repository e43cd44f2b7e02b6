"""What attends over packs on a GPU is what attention is; FlexAttention, uncompiled, runs on a CPU too."""

import pytest
import torch
from naive_attention import drawn_pack, naive
from rows_made import random_rows

from rein.config.recipe import Model
from rein.errors import ConfigError
from rein.models import varlen
from rein.models.attention import NAMES


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
def test_flex_attention_sees_a_row_and_no_other(window: int | None) -> None:
    drawn, _, layout = drawn_pack(random_rows(7), torch.float64, "cpu")
    given = [tensor.detach() for tensor in drawn]  # on a CPU it makes no gradient
    found = varlen.flex_attention(*given, layout, None, window)
    assert torch.allclose(found, naive(*given, layout.lengths, window), atol=1e-12)


def test_segments_begin_where_the_pack_says() -> None:
    _, _, layout = drawn_pack(random_rows(7), torch.float32, "cpu")
    begins = layout.begins(torch.device("cpu"))
    assert begins.dtype == torch.int32
    assert begins.tolist()[1:] == torch.tensor(layout.lengths).cumsum(0).tolist()
    assert begins[-1] == layout.groups[-1].stop
    assert layout.begins(torch.device("cpu")) is begins  # made once for all layers


def test_every_way_has_a_name_that_transformers_takes_for_no_kernel_of_its_own() -> None:
    ways = Model.model_fields["attn_implementation"].annotation.__args__  # type: ignore[union-attr]
    assert set(NAMES) == set(ways) == {"auto", "sdpa", *varlen.KERNELS}
    assert not any(word in name for name in NAMES.values() for word in ("flash", "flex", "sdpa", "eager"))


def test_on_a_cpu_no_kernel_is_taken() -> None:
    assert all(varlen.kernel_for(torch.zeros(1, 1, 16), wanted) is None for wanted in NAMES)


@pytest.mark.skipif(varlen.installed("flash_attention_2"), reason="flash-attn is installed")
def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="flash_attention_2 is not here; install flash-attn"):
        varlen.require("flash_attention_2")
