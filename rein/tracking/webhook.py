"""Events to a URL of the user's, as JSON. A URL that does not answer is said once and never stops a run."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rein.errors import ConfigError, shown

TIMEOUT_S = 5.0


class Webhook:
    """Posts to one URL. Raises ConfigError for what is no http(s) URL."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"guards.webhook: {url} is no http or https URL; correct it")
        self.url, self.failed = url, False

    def post(self, event: Mapping[str, Any]) -> str:
        """Send one event; what to say where it failed for the first time, else nothing."""
        body = json.dumps(event, default=str).encode()
        try:
            request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return ""
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            said, self.failed = self.failed, True
            why = f"does not answer ({shown(str(error))}); events go on to journal.jsonl"
            return "" if said else f"guards.webhook: {self.url} {why}"
