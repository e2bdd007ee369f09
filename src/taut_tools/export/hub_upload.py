"""Uploads to the Hugging Face hub: one commit with all files, or none.

    place = lookup("org/name", "model")               the user, and the repository if it exists
    commit(place, files, "Upload", is_private=True)   makes the repository and the branch if they are missing

huggingface_hub uploads large files first, by the protocol that the hub chooses, and repeats requests that fail in
transit; only the commit makes files visible. Each of its errors becomes one line. It is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taut.errors import OutputError
from taut.io import hub
from taut.io.temporary import TemporaryFolder

Kind = Literal["model", "dataset"]
CARD = "README.md"


@dataclass(frozen=True)
class Place:
    """A repository, which need not exist yet."""

    name: str
    """Owner and name: owner/name."""
    kind: Kind
    revision: str | None
    """Branch, or None for the main one."""
    is_private: bool | None
    """Whether the repository is private, or None where it does not exist."""
    card: str | None
    """Text of its README.md, or None without one."""


def lookup(name: str, kind: Kind, revision: str | None = None) -> Place:
    """Look up a repository at the hub; a name without an owner is the user's own. Changes nothing. Raises OutputError
    where the hub cannot be reached, or does not know the user.
    """
    from huggingface_hub import HfApi, constants, errors, get_token

    if get_token() is None:
        raise OutputError(
            f"{name} cannot be uploaded without a token of the hub's; expected one with write access; log in "
            "(hf auth login), or set HF_TOKEN"
        )
    reason = hub.settle() or ("HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None)
    if reason is not None:
        raise OutputError(
            f"{constants.ENDPOINT} cannot be reached ({reason}); expected a network; out=DIR writes the folder "
            "without it"
        )
    api = HfApi()
    with _explained(name):
        user = api.whoami()["name"]
        whole = name if "/" in name else f"{user}/{name}"
        try:
            is_private = bool(api.repo_info(whole, repo_type=kind).private)
        except errors.RepositoryNotFoundError:
            return Place(whole, kind, revision, None, None)
        for branch in dict.fromkeys((revision, None)):  # a new branch begins as the main one
            try:
                with TemporaryFolder("card") as folder:
                    file = api.hf_hub_download(
                        whole, CARD, repo_type=kind, revision=branch, local_dir=folder
                    )
                    card = Path(file).read_text(encoding="utf-8")
            except errors.RevisionNotFoundError:
                continue
            except errors.RemoteEntryNotFoundError:
                break
            return Place(whole, kind, revision, is_private, card)
    return Place(whole, kind, revision, is_private, None)


def commit(
    place: Place, files: Mapping[str, Path | bytes], message: str, *, is_private: bool
) -> str:
    """Upload files under the names of ``files``; the address of the commit. ``is_private`` is for a new repository."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    additions = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in files.items()
    ]
    with _explained(place.name):
        if place.is_private is None:
            api.create_repo(place.name, repo_type=place.kind, private=is_private)
        if place.revision is not None:
            api.create_branch(
                place.name, repo_type=place.kind, branch=place.revision, exist_ok=True
            )
        done = api.create_commit(
            place.name,
            additions,
            commit_message=message,
            repo_type=place.kind,
            revision=place.revision,
        )
    return str(done.commit_url)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise OutputError for errors of huggingface_hub."""
    import httpx2
    from huggingface_hub import errors

    known = (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        httpx2.HTTPError,
        OSError,
        RuntimeError,
    )
    try:
        yield
    except known as error:
        line = next(filter(None, (_meaning(name, cause) for cause in hub.causes(error))), None)
        if line is None:
            raise
        raise OutputError(line) from error


def _meaning(name: str, error: BaseException) -> str | None:
    """Explain an error of huggingface_hub in a line; None for an error that is not about the hub."""
    import httpx2
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return f"name={name} is no name of a repository: {error}; expected NAME or OWNER/NAME"
    if isinstance(error, httpx2.RequestError):
        return (
            f"{constants.ENDPOINT} stopped answering ({type(error).__name__}); nothing was committed to {name}; give "
            "the same command again: what has been uploaded is not sent again"
        )
    if not isinstance(error, errors.HfHubHTTPError):
        return None
    status = error.response.status_code
    said = " ".join((error.server_message or str(error).partition("\n")[0]).split())[:200]
    if status == 401:
        return f"the hub does not accept the token ({said}); expected a valid one; log in again (hf auth login)"
    if status == 403:
        return (
            f"the token may not write to {name} ({said}); expected one with write access there; make one, or name a "
            "repository of your own"
        )
    if status == 409:
        return f"name={name} is taken ({said}); expected a free name; name another"
    remedy = "correct it" if status < 500 and status != 429 else "give the same command again"
    return f"the hub refused {name} with status {status} ({said}); nothing was committed; {remedy}"
