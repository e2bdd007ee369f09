"""Runs programs on the machines of a service, Piston, E2B or Morph, with the interface of ``Sandbox``.

    remote = open_remote(Remote(service="piston", addresses=("http://127.0.0.1:2000/api/v2",)), Limits())
    remote.run("print(1 + 1)", [Trial()])

What is sent where, and which limits hold there, is in ``docs/sandbox.md``.
"""

from __future__ import annotations

from taut.sandbox.limits import Limits
from taut.sandbox.remote.executor import RemoteSandbox, Where
from taut.sandbox.remote.settings import HERE, Remote, ServiceName

__all__ = ["HERE", "Remote", "RemoteSandbox", "ServiceName", "Where", "open_remote"]


def open_remote(remote: Remote, limits: Limits | None) -> RemoteSandbox:
    """The executor for a service. ``limits``: a known program is first run within these; None: nothing is sent.

    Raises ConfigError if the settings or the key are missing, and SandboxError if the service does not work.
    """
    opened = RemoteSandbox(remote)
    if limits is not None:
        try:
            opened.prove(limits)
        except BaseException:
            opened.close()
            raise
    return opened
