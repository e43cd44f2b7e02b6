"""The pages of a folder, asked without a network."""

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rein import journal
from rein.ui.app import make_app


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """Asks for pages over tmp_path / "runs"."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    return TestClient(make_app(tmp_path / "runs", journal.standing), base_url="http://127.0.0.1:7346")


@pytest.fixture
def page(client: TestClient) -> Callable[..., str]:
    """The text of a page that must be there."""

    def text(address: str, status: int = 200) -> str:
        answer = client.get(address)
        assert answer.status_code == status, answer.text
        assert "Traceback" not in answer.text
        return str(answer.text)

    return text
