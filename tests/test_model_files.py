"""A model folder's settings are objects and its stop ids ids, or the file is named."""

from pathlib import Path

import pytest

from rein.errors import CheckpointError
from rein.model_files import open_weights, read_json, stop_ids_of


@pytest.mark.parametrize("text", ["{", "[]", "null", "3", "", "[" * 100_000, '{"a": "\udcff"}'])
def test_what_is_no_json_object_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError) as caught:
        read_json(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert message.endswith("; write it anew")
    assert caught.value.exit_code == 6


def test_a_file_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert read_json(tmp_path / "config.json") == {}
    assert stop_ids_of(tmp_path) == set()


@pytest.mark.parametrize("ids", ['"x"', '["x"]', "{}", "[[1]]", "1.5", "true", "1" + "0" * 30])
def test_a_stop_id_that_is_no_id_is_named(ids: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id holds .*; correct it"):
        stop_ids_of(tmp_path)


def test_the_ids_of_both_files_end_a_response(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert stop_ids_of(tmp_path) == {1, 7, 9}
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert stop_ids_of(tmp_path) == {7, 9}


def test_weights_are_open_to_whoever_may_read_the_rest(tmp_path: Path) -> None:
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).touch()
    for file in tmp_path.glob("*.safetensors"):
        file.chmod(0o600)
    (tmp_path / "config.json").chmod(0o640)
    open_weights(tmp_path)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}
