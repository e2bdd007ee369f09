"""The settings of a remote executor: which service, where it is, and which environment variable holds its key."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from taut.config import changed, configclass, read_secret, read_url
from taut.errors import ConfigError

ServiceName = Literal["piston", "e2b", "morph"]

KEYS: dict[ServiceName, str | None] = {
    "piston": None,
    "e2b": "E2B_API_KEY",
    "morph": "MORPH_API_KEY",
}
"""The environment variable in which each service's own SDK looks for its key. Piston needs none by default."""


@configclass
class Remote:
    """A service that runs programs on its machines. Programs, standard inputs, call arguments and asserts are sent to
    it; expected outputs and values are not."""

    service: ServiceName | None = None
    """The service: piston (a server of your own), e2b or morph. By default programs run on this machine. Programs and
    tests are sent to the service."""
    addresses: tuple[str, ...] = ()
    """URLs of the service's API. By default PISTON_ENDPOINTS (several, separated by commas), E2B_API_URL or
    https://api.e2b.app, MORPH_BASE_URL or https://cloud.morph.so/api. Several Piston servers take turns."""
    machines: str | None = None
    """E2B: URL at which machines are reached. By default E2B_SANDBOX_URL, or the address that E2B gives each one."""
    api_key_env: str | None = None
    """Environment variable with the key. By default E2B_API_KEY or MORPH_API_KEY, and none for Piston."""
    image: str | None = None
    """Piston: version of its Python package, * by default. E2B: template, code-interpreter-v1 by default. Morph:
    snapshot with python3, required."""
    concurrency: Annotated[int, Field(gt=0)] = 16
    """Programs that one process of taut runs at the service at a time. A reward worker is a process and runs one; calls
    of the tool python beyond this number wait for one another within their step's timeout."""
    wait_seconds: Annotated[float, Field(gt=0, le=1e6)] = 60.0
    """Seconds that the service may take for a program in addition to limits.total_seconds: starting machines, queues,
    retries."""

    def __post_init__(self) -> None:
        """Raises ConfigError if two settings contradict each other."""
        if self.service is None:
            for name in changed(self):
                raise ConfigError(
                    f"remote.{name} is set and remote.service is not: nothing reads it; expected a service; set "
                    f"remote.service, or take {name} out (of the reward, or of rollout.environment.remote)"
                )
            return
        if self.service != "piston" and len(self.addresses) > 1:
            raise ConfigError(
                f"remote.addresses has {len(self.addresses)} URLs and remote.service is {self.service}; expected one; "
                "several are for piston"
            )
        if self.service != "e2b" and self.machines is not None:
            raise ConfigError(
                f"remote.machines is set and remote.service is {self.service}; expected it for e2b only; take it out"
            )
        if self.service == "morph" and self.image is None:
            raise ConfigError(
                "remote.service is morph and remote.image is not set; expected the id of a snapshot that has python3; "
                "set it"
            )

    def urls(self) -> tuple[str, ...]:
        """URLs of the API. Raises ConfigError if neither the settings nor the environment name one."""
        if self.addresses:
            return tuple(
                read_url(url, "remote.addresses", "remote.api_key_env") for url in self.addresses
            )
        if self.service == "e2b":
            named = os.environ.get("E2B_API_URL")
            return (
                read_url(
                    named or f"https://api.{e2b_domain()}", "E2B_API_URL", "remote.api_key_env"
                ),
            )
        if self.service == "morph":
            named = os.environ.get("MORPH_BASE_URL")
            return (
                read_url(
                    named or "https://cloud.morph.so/api", "MORPH_BASE_URL", "remote.api_key_env"
                ),
            )
        addresses = [url.strip() for url in os.environ.get("PISTON_ENDPOINTS", "").split(",")]
        if not any(addresses):
            raise ConfigError(
                "remote.service is piston, and neither remote.addresses nor the environment variable PISTON_ENDPOINTS "
                "is set; expected URLs as in http://127.0.0.1:2000/api/v2; set one of them"
            )
        return tuple(
            read_url(url, "PISTON_ENDPOINTS", "remote.api_key_env") for url in addresses if url
        )

    def machines_url(self) -> str | None:
        """The one address of all of E2B's machines; None: E2B gives each its own."""
        named = self.machines or os.environ.get("E2B_SANDBOX_URL")
        return read_url(named, "remote.machines", "remote.api_key_env") if named else None

    def secret(self) -> tuple[str | None, str | None]:
        """The environment variable that holds the key, and the key. Raises ConfigError if it is not set."""
        assert self.service is not None, "asked where there is a service"
        name = self.api_key_env or KEYS[self.service]
        return name, read_secret(name, "remote.api_key_env")


HERE = Remote()
"""No service: programs run on this machine."""


def e2b_domain() -> str:
    """The domain of E2B, and of its machines unless it answers otherwise."""
    return os.environ.get("E2B_DOMAIN") or "e2b.app"
