"""Two nodes, simulated on this machine, started by torchrun: the losses of one process, and what they must share."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.helpers.chat_runs import (
    PLAIN,
    QUIET,
    column,
    events,
    largest_difference,
    sft,
    weights,
    words_of,
)
from tests.helpers.simulated_slurm import write_commands

import taut

SECONDS = 240
SOURCE = str(Path(taut.__file__).parents[1])


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return {**kept, **write_commands(folder, SOURCE)}


def require_equal(out: Path, whole: taut.Result) -> None:
    """Each step once, with the losses, gradients and weights of one process."""
    assert column(out, "step") == column(whole.out, "step")
    for name in ("loss", "grad_norm"):
        assert column(out, name) == pytest.approx(column(whole.out, name), rel=1e-9)
    assert largest_difference(weights(out / "model"), weights(whole.model)) < 1e-9


def on_two_nodes(
    place: Path, *words: str, folders: Sequence[Path], **variables: Sequence[Path]
) -> list[tuple[int, str]]:
    """``torchrun ... -m taut WORDS`` on each node, one rank on each, in its folder: exit code and stderr of both.
    ``variables``: environment variables, with a value for each node.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base = environment(place / "bin")
    nodes = []
    for rank in range(2):
        own = {name: str(values[rank]) for name, values in variables.items()}
        command = ["torchrun", "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "taut", *words]
        nodes.append(
            subprocess.Popen(
                command,
                env={**base, **own, "NODE": f"node{rank}"},
                cwd=folders[rank],
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    texts = [node.communicate(timeout=SECONDS)[1] for node in nodes]
    return [(node.returncode, text) for node, text in zip(nodes, texts, strict=True)]


@pytest.mark.slow
def test_torchrun_on_two_nodes_gives_the_losses_of_one_process(
    model: Path, train: Path, tmp_path: Path
) -> None:
    keys = {"model": model, "data.train": train, "out": tmp_path / "out", **QUIET, "steps": 4}
    caches = [tmp_path / "cache0", tmp_path / "cache1"]
    words = words_of({**keys, "checkpoint.every": 2, "contract.prompts": 0})
    done = on_two_nodes(tmp_path, "sft", *words, folders=[tmp_path] * 2, TAUT_CACHE=caches)
    assert [code for code, _ in done] == [0, 0], done
    require_equal(tmp_path / "out", sft(model, train, tmp_path / "whole", **PLAIN, steps=4))
    found = {event["name"]: event for event in events(tmp_path / "out", "check")}
    assert found["cluster.processes"]["notes"] == ["node0: rank 0", "node1: rank 1"]
    assert found["cluster.output"]["outcome"] == "passed"
    assert "each node tokenizes the data for itself" in found["cluster.cache"]["detail"]
    keys_of_cache = [{path.name for path in cache.iterdir()} for cache in caches]
    assert keys_of_cache[0] == keys_of_cache[1] != set()


@pytest.mark.slow
def test_an_out_that_the_nodes_do_not_share_ends_the_run_in_a_line(
    model: Path, train: Path, tmp_path: Path
) -> None:
    """Each node is in a folder of its own, so that ``local/out`` is another one on each."""
    keys = {"model": model, "data.train": train, "out": "local/out", **QUIET, "steps": 2}
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        (folder / "local").mkdir(parents=True)
    done = on_two_nodes(tmp_path, "sft", *words_of(keys), folders=folders)
    assert all(code for code, _ in done)
    texts = [line for _, text in done for line in text.splitlines()]
    (line,) = [line for line in texts if line.startswith("taut: error")]
    assert "cluster.output: local/out on node1: another folder of the same name; expected" in line
    assert [list((folder / "local").iterdir()) for folder in folders] == [[], []]
