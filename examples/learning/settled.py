"""Training that is slower than generation: ``log.sinks=[examples/learning/settled.py:Settled]`` against server.py.

After each rollout it waits until the server has answered all that it is asked, and then the step is trained. So what
waits for the next steps is as old as ``rollout.lag`` allows, however fast the machine is.
"""

from __future__ import annotations

from typing import Any
from urllib.request import urlopen


class Settled:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.url = f"{settings['rollout.urls'].removesuffix('/v1')}/settled"

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "rollout":
            urlopen(self.url).close()
