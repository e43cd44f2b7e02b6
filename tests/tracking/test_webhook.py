"""Events are posted as JSON; a URL that does not answer is said once, in one line, and raises nothing."""

import json

import pytest
from listener import listening

from rein.errors import ConfigError
from rein.tracking.webhook import Webhook

pytestmark = pytest.mark.usefixtures("no_proxy")


def test_an_event_is_posted_as_json() -> None:
    with listening() as server:
        hook = Webhook(f"http://127.0.0.1:{server.server_port}/hook")
        assert hook.post({"kind": "verdict", "value": 0.5, "reason": "größer"}) == ""
    ((kind, body),) = server.heard
    assert kind == "application/json"
    assert json.loads(body) == {"kind": "verdict", "value": 0.5, "reason": "größer"}


@pytest.mark.parametrize("code", [404, 500])
def test_an_answer_that_is_an_error_is_said_once_and_events_go_on_to_be_posted(code: int) -> None:
    with listening(code) as server:
        hook = Webhook(f"http://127.0.0.1:{server.server_port}/")
        first, second = hook.post({"kind": "a"}), hook.post({"kind": "b"})
    assert f"guards.webhook: {hook.url} does not answer (HTTP Error {code}" in first
    assert "events go on to journal.jsonl" in first
    assert second == ""
    assert len(server.heard) == 2


def test_what_answers_no_http_is_said_in_one_line() -> None:
    with listening(nonsense=True) as server:
        hook = Webhook(f"http://127.0.0.1:{server.server_port}/")
        said = hook.post({"kind": "a"})
    assert "does not answer" in said
    assert said.isprintable()


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://127.0.0.1:1/", "http://127.0.0.1:99999/"])
def test_a_url_where_nobody_is_raises_nothing(url: str) -> None:
    hook = Webhook(url)
    assert f"{url} does not answer" in hook.post({"kind": "a"})
    assert hook.post({"kind": "b"}) == ""


@pytest.mark.parametrize("url", ["ftp://x/y", "localhost:80", "", "file:///etc/passwd"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no http or https URL; correct it"):
        Webhook(url)
