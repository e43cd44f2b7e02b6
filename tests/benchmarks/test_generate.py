"""The generation benchmark: what is tried on is the middle of the prompts, and vllm gets just enough room."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import generate
import generate_work

WORK = {"prompts": [[0] * n for n in (9, 1, 5, 4, 3, 8, 7, 2)], "lengths": [[n, 2 * n] for n in range(8)]}


def test_the_part_is_the_prompts_of_middle_length_with_their_answers() -> None:
    part = generate.middle_part(WORK)
    assert [len(prompt) for prompt in part["prompts"]] == [5, 4]
    assert part["lengths"] == [[2, 4], [3, 6]]


def test_room_in_the_cache_is_for_the_longest_answers_and_no_more(tmp_path: Path) -> None:
    config = {"num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    numbers = 2 * 3 * 2 * 8  # of a token
    block, longest = generate_work.BLOCK, generate_work.LONGEST
    short = generate_work.cache_bytes(tmp_path, WORK, 2, "bfloat16")
    assert short == longest * numbers * 2, "a prompt of the longest kind fits"
    many = {"prompts": [[0] * 40] * 30, "lengths": [[block, 10 * block]] * 30}
    assert generate_work.cache_bytes(tmp_path, many, 30, "float32") == block * (30 * 12 + 1) * numbers * 4
