"""One virtual environment per peer, made on first use from the pins beside this file.

torch is installed first, so that no resolver swaps the CPU build for another. LLaMA-Factory's
torchvision and torchaudio do not load beside CPU torch and are taken out again (text training needs
neither). What pictures need, a torchvision that loads with a trick (``train_trl_vision.py``) and Pillow,
is a folder of its own, which no other worker has on its path.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

PEERS = Path(__file__).parent


def python_of(peer: str, cache: Path) -> Path:
    """The interpreter of the peer's environment, which is made where it is missing or outdated."""
    pins = (PEERS / f"{peer}.txt").read_text()
    home = cache / "peers" / peer
    python, made_from = home / "bin" / "python", home / "made-from.txt"
    if made_from.exists() and made_from.read_text() == pins:
        return python
    print(f"{peer}: making {home} (minutes, once)", flush=True)
    venv.create(home, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "--quiet", "--disable-pip-version-check"]
    torch_pin = next(line for line in pins.splitlines() if line.startswith("torch=="))
    subprocess.run([*install, torch_pin], check=True, stdout=sys.stderr)
    subprocess.run([*install, "-r", str(PEERS / f"{peer}.txt")], check=True, stdout=sys.stderr)
    if peer == "llamafactory":
        subprocess.run(
            [*pip, "uninstall", "--quiet", "-y", "torchvision", "torchaudio"], check=True
        )
    made_from.write_text(pins)
    return python


def folder_of(name: str, cache: Path) -> Path:
    """A folder of packages without what they depend on, for a worker to put on its path."""
    pins = (PEERS / f"{name}.txt").read_text()
    home = cache / "peers" / name
    made_from = home / "made-from.txt"
    if made_from.exists() and made_from.read_text() == pins:
        return home
    shutil.rmtree(home, ignore_errors=True)
    pip = [str(python_of("trl", cache)), "-m", "pip", "install", "--quiet", "--no-deps"]
    pip += ["--disable-pip-version-check", "--target", str(home), "-r", str(PEERS / f"{name}.txt")]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    made_from.write_text(pins)
    return home
