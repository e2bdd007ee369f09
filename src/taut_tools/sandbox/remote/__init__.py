"""Run programs on the machines of a service, Piston, E2B or Morph, with the interface of ``Sandbox``.

    remote = open_remote(Remote(service="piston", addresses=("http://127.0.0.1:2000/api/v2",)), Limits())
    remote.run("print(1 + 1)", [Trial()])

``docs/environments.md`` says what is sent to each service, and which limits hold there.
"""

from __future__ import annotations

from taut.rl.settings import Remote
from taut_tools.sandbox.limits import Limits
from taut_tools.sandbox.remote.executor import RemoteSandbox

__all__ = ["RemoteSandbox", "open_remote"]


def open_remote(remote: Remote, limits: Limits | None) -> RemoteSandbox:
    """Open the connection to a service, and run a known program within ``limits`` there, unless they are None.

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
