"""``taut launch slurm``: the script as people submit it, and what is refused in one line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.helpers.refusals import ErrorCode, says

from taut.cli import main
from taut.config import fields_of
from taut.errors import ClusterError, ConfigError
from taut.methods import METHODS
from taut_tools.cluster.launch import read
from taut_tools.cluster.settings import LaunchSlurm, seconds_of
from taut_tools.cluster.slurm import script_of, slurm

KEYS = ["model=m", "data.train=a.jsonl", "steps=1", "out=runs/a"]
GOLDEN = Path(__file__).parents[2] / "golden" / "slurm"
CASES = {
    "gpus": ["nodes=2", "gpus_per_node=8", "partition=gpu", "setup=source .venv/bin/activate"],
    "processors": [
        *("nodes=4", "gpus_per_node=0", "workers_per_node=2", "cpus_per_node=16", "port=29500"),
        *("method=dpo", "time=1-0", "notice=600", "sbatch=--qos=high --exclude=n1", "account=lab"),
    ],
    "container": ["container=taut.sqsh", "mounts=/data:/data", 'data.system="two words; $HOME"'],
}
"""The words of a command -> its script, in a file of that name."""


def script(*words: str) -> str:
    return script_of(read(LaunchSlurm, None, [*KEYS, *words]), Path("/shared/a project"))


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_one_that_is_kept(name: str) -> None:
    """Written anew with: python -m tests.tools.cluster.test_slurm"""
    text = script(*CASES[name])
    assert text == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    head = text.partition("\n\n")[0].splitlines()
    assert head[0] == "#!/bin/bash"  # sbatch reads its options up to the first command
    assert all(line.startswith("#SBATCH --") for line in head[1:])


def test_the_run_is_passed_on_word_for_word() -> None:
    """By a shell that runs the last lines of the script, with ``srun`` in the place of a function that prints."""
    text = script('data.system="two words; $HOME"', "resume=true")
    begin = text.index("first=$(scontrol")
    line = text[begin : text.index("step=$!")]
    program = (
        f'scontrol() {{ echo a; echo b; }}; srun() {{ printf "%s\\n" "$@"; }}; node=N; {line} wait'
    )
    done = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"SLURM_JOB_ID": "20003", "SLURM_JOB_NODELIST": "x", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.splitlines() == [
        *("--kill-on-bad-exit=1", "--cpu-bind=none", "bash", "-c", "N", "taut", "a:10003"),
        *("sft", "model=m", "data.train=a.jsonl", "steps=1", "out=runs/a"),
        *('data.system="two words; $HOME"', "resume=true"),
    ]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:01", 7201),
        ("1-2", 93600),
        ("1-2:30", 95400),
        ("0-0:0:5", 5),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


def test_the_keys_of_the_launcher_are_of_no_run() -> None:
    for method in METHODS.values():
        assert not set(fields_of(LaunchSlurm)) & set(fields_of(method))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nodes=0"], "found nodes=0 on the command line"),
        (["gpus_per_node=8", "workers_per_node=2"], ErrorCode("workers_per_node/gpus_per_node")),
        (["time=tomorrow"], "time=tomorrow; expected minutes, HH:MM:SS"),
        (["time=5"], ErrorCode("notice/time")),
        (["mounts=/data:/data"], ErrorCode("mounts/container")),
        (["partition=a b"], ErrorCode("partition")),
        (
            ["sbatch=qos=high"],
            "sbatch=qos=high: 'qos=high' is none; expected options like --qos=high",
        ),
        (["nodes=3", "parallel.replicas=2"], "parallel.replicas=2, and there are 3 ranks"),
        (["overwrite=true"], "overwrite=true: a launched run"),
        (["stepz=3"], "unknown key 'stepz'"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        slurm(None, [*KEYS, *words])
    assert says(caught.value, problem)
    assert list(tmp_path.iterdir()) == []


def test_bad_input_of_the_command_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for words, problem in (
        (["none.toml", "--dry-run"], "none.toml"),
        (KEYS, "there is no sbatch here; expected a machine that submits to a Slurm cluster; run"),
    ):
        assert main(["launch", "slurm", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("taut: error: ") and problem in line
    assert main(["launch", "slurm", *KEYS, "nodes=2", "--dry-run"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_what_sbatch_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho sbatch: error: Invalid account >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ClusterError, match="did not take the job: sbatch: error: Invalid account;"):
        slurm(None, KEYS)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case, given in CASES.items():
        (GOLDEN / f"{case}.sbatch").write_text(script(*given), encoding="utf-8")
