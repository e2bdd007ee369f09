"""The address of a service and the key for it, from the settings, or else from the environment variables that the
service's own SDK reads.
"""

from __future__ import annotations

import os

from taut.config import read_secret, read_url
from taut.errors import ConfigError
from taut.rl.settings import Remote, ServiceName

KEYS: dict[ServiceName, str | None] = {
    "piston": None,
    "e2b": "E2B_API_KEY",
    "morph": "MORPH_API_KEY",
}
"""Environment variable from which each service's own SDK reads its key. Piston needs none by default."""


def urls(remote: Remote) -> tuple[str, ...]:
    """URLs of the API. Raises ConfigError if neither the settings nor the environment name one."""
    if remote.addresses:
        return tuple(
            read_url(url, "remote.addresses", "remote.api_key_env") for url in remote.addresses
        )
    if remote.service == "e2b":
        named = os.environ.get("E2B_API_URL") or f"https://api.{e2b_domain()}"
        return (read_url(named, "E2B_API_URL", "remote.api_key_env"),)
    if remote.service == "morph":
        named = os.environ.get("MORPH_BASE_URL") or "https://cloud.morph.so/api"
        return (read_url(named, "MORPH_BASE_URL", "remote.api_key_env"),)
    addresses = [url.strip() for url in os.environ.get("PISTON_ENDPOINTS", "").split(",")]
    if not any(addresses):
        raise ConfigError(
            "remote.service=piston, and neither remote.addresses nor PISTON_ENDPOINTS is set; expected URLs such as "
            "http://127.0.0.1:2000/api/v2; set one of them"
        )
    return tuple(
        read_url(url, "PISTON_ENDPOINTS", "remote.api_key_env") for url in addresses if url
    )


def machines_url(remote: Remote) -> str | None:
    """The common address of E2B's machines, or None if E2B gives each its own."""
    named = remote.machines or os.environ.get("E2B_SANDBOX_URL")
    return read_url(named, "remote.machines", "remote.api_key_env") if named else None


def secret(remote: Remote) -> tuple[str | None, str | None]:
    """The name of the environment variable with the key, and the key. Raises ConfigError if it is not set."""
    assert remote.service is not None, "asked where there is a service"
    name = remote.api_key_env or KEYS[remote.service]
    return name, read_secret(name, "remote.api_key_env")


def e2b_domain() -> str:
    """The domain of E2B, and of its machines unless E2B names another."""
    return os.environ.get("E2B_DOMAIN") or "e2b.app"
