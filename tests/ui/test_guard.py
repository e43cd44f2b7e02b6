"""Who may ask, and for what: nothing outside of the folder, nothing from elsewhere, nothing but reading."""

import os
from pathlib import Path

import pytest
from runs_made import make_run, write, write_trajectories
from starlette.testclient import TestClient

from rein import journal
from rein.ui.app import make_app
from rein.ui.folder import Absent, Folder
from rein.ui.guard import name_of


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7346", "", "192.168.0.7", "[::2]"],
)
def test_a_name_that_is_not_this_machines_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:7346", "localhost", "LOCALHOST:9", "[::1]:7346"])
def test_the_names_of_this_machine_are_known(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


def test_a_given_host_is_known_too_and_addresses_but_no_other_name(tmp_path: Path) -> None:
    app = make_app(tmp_path, journal.standing, frozenset({"box"}))
    client = TestClient(app, base_url="http://box")
    assert client.get("/").status_code == 200
    assert client.get("/", headers={"host": "10.0.0.5:7346"}).status_code == 200
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_pages_are_only_read(client: TestClient, method: str) -> None:
    answer = client.request(method, "/")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    ],
)
def test_another_site_gets_nothing(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/", headers=headers).status_code == 403


def test_its_own_pages_and_links_from_elsewhere_are_answered(client: TestClient) -> None:
    own = {"origin": "http://127.0.0.1:7346", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    assert client.get("/", headers=own).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=link).status_code == 200


def test_every_page_has_a_policy_with_its_own_nonce(client: TestClient) -> None:
    first, second = client.get("/"), client.get("/")
    policy = first.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert policy != second.headers["content-security-policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert first.text.count("<script") == first.text.count(f'nonce="{nonce}"')
    assert " on" not in first.text.partition("<body")[2].replace(" one", "")  # no inline handlers
    assert first.headers["x-content-type-options"] == "nosniff"
    assert first.headers["cross-origin-resource-policy"] == "same-origin"


def test_a_page_that_has_not_changed_is_not_sent_again(client: TestClient, tmp_path: Path) -> None:
    tag = client.get("/").headers["etag"]
    assert client.get("/", headers={"if-none-match": tag}).status_code == 304
    make_run(tmp_path / "runs" / "new")
    assert client.get("/", headers={"if-none-match": tag}).status_code == 200


OUTSIDE = [
    "../secret",
    "..%2fsecret",
    "%2e%2e/secret",
    "a/../../secret",
    "/etc",
    "//etc/passwd",
    "..\\secret",
    "a%00/../secret",
    "%00",
    "link",
    "a/link",
    "./a",
    "a/.",
    "",
    "a/train",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leads_out_of_the_folder(client: TestClient, tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "secret", settings={"seed": "SECRET"})
    make_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "runs" / "a" / "link").symlink_to(tmp_path / "secret")
    for address in (f"/run?name={name}", f"/compare?run=a&run={name}", f"/rows?name={name}&file=x"):
        answer = client.get(address)
        assert answer.status_code == 404, address
        assert "SECRET" not in answer.text
    assert client.get("/").text.count('scope="row"') == 1


@pytest.mark.parametrize(
    "file", ["../../secret/t.parquet", "/etc/passwd", "train/metrics.jsonl", "%00", "recipe.json"]
)
def test_only_files_of_rows_are_opened(client: TestClient, tmp_path: Path, file: str) -> None:
    make_run(tmp_path / "runs" / "a")
    write_trajectories(tmp_path / "secret" / "t.parquet")
    assert client.get(f"/rows?name=a&file={file}").status_code == 404
    assert client.get(f"/row?name=a&file={file}&row=0").status_code == 404


def test_files_that_are_links_out_of_the_folder_are_not_read(client: TestClient, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    outside = write_trajectories(tmp_path / "secret" / "t.parquet")
    (run / "score").mkdir()
    (run / "score" / "trajectories.parquet").symlink_to(outside)
    (run / "recipe.json").unlink()
    (run / "recipe.json").symlink_to(write(tmp_path / "secret" / "r.json", {"seed": "SECRET"}))
    assert "SECRET" not in client.get("/run?name=a").text
    assert client.get("/rows?name=a&file=score/trajectories.parquet").status_code == 404


def test_a_pipe_in_place_of_a_file_is_not_waited_for(client: TestClient, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    (run / "train" / "metrics.jsonl").unlink()
    os.mkfifo(run / "train" / "metrics.jsonl")
    assert client.get("/run?name=a").status_code == 200


def test_a_path_is_inside_or_absent(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.path(".") == tmp_path.resolve()
    for name in ("..", "a\0b", "nothere", "/", "a//b"):
        with pytest.raises(Absent):
            folder.path(name)


@pytest.mark.parametrize(("host", "name"), [("a:1", "a"), ("[::1]:80", "::1"), ("A", "a"), ("::1]", "::1")])
def test_a_host_without_its_port(host: str, name: str) -> None:
    assert name_of(host) == name


def test_long_addresses_and_unknown_pages_are_answered_in_words(client: TestClient) -> None:
    assert client.get("/?q=" + "x" * 9000).status_code == 414
    assert client.get("/nothing").status_code == 404
