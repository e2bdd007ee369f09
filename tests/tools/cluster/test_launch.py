"""``taut launch``: the launcher's keys and the run's, what is refused, and what a rank is started with."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from tests.helpers.refusals import ErrorCode, says

from taut import cli
from taut.config import fields_of, load
from taut.errors import ConfigError, OutputError
from taut.io import extras
from taut.methods import METHODS
from taut.methods.method import class_of
from taut_tools.cluster.launch import _named_in_file, _served, _servers, ray, read
from taut_tools.cluster.ray_servers import _request_at, pointed
from taut_tools.cluster.relay import Job
from taut_tools.cluster.servers import Doors, Place
from taut_tools.cluster.settings import LaunchRay

KEYS = ["model=m", "data.train=a.jsonl", "steps=1"]


def test_the_keys_of_the_launcher_are_of_no_run() -> None:
    for method in METHODS.values():
        assert not set(fields_of(LaunchRay)) & set(fields_of(method))


def test_a_rank_is_started_with_the_runs_own_words(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = "dpo"\nmodel = "m"\ndata.train = "a.jsonl"\n')
    words = ["nodes=2", f"out={tmp_path / 'out'}", "resume=true", "steps=3", "restarts=1"]
    asked = read(LaunchRay, file, words)
    assert asked.words == ("dpo", str(file), f"out={tmp_path / 'out'}", "steps=3", "resume=true")
    assert (asked.launcher.nodes, asked.launcher.restarts) == (2, 1)
    assert asked.run.method == "dpo"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nodes=0"], "found nodes=0 on the command line"),
        (["gpus_per_node=-1"], "found gpus_per_node=-1"),
        (["overwrite=true"], "overwrite=true: a launched run"),
        (["gpus_per_node=2", "workers_per_node=4"], "workers_per_node=4 and gpus_per_node=2"),
        (["min_workers=3", "max_workers=2"], "min_workers=3 and at most 2 ranks"),
        (["nodes=3", "parallel.replicas=2"], "parallel.replicas=2, and there are 3 ranks"),
        (["env=[NO_SUCH_VARIABLE]"], "env: NO_SUCH_VARIABLE is not set here"),
        (["stepz=3"], "unknown key 'stepz'"),
        (
            ["gpus_per_server=2"],
            ErrorCode("gpus_per_server/servers"),
        ),
        (["servers=2"], "servers=2 and sft, which asks none"),
        (["colocate=true"], ErrorCode("colocate/servers")),
        (
            ["reward_server_command=x"],
            ErrorCode("reward_server_command/reward_servers"),
        ),
        (["reward_servers=2"], "reward_servers=2 and no command that starts one"),
        (
            ["reward_servers=2", "reward_server_command={serve} rm"],
            "reward_servers=2, and no setting of the run names {reward_servers}",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_before_ray_is_asked(
    tmp_path: Path, words: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ray(None, [*KEYS, f"out={tmp_path / 'out'}", *words])
    assert says(caught.value, problem)
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_servers_is_one_that_asks_them(tmp_path: Path) -> None:
    grpo = [*KEYS, "method=grpo", "rewards=math", "lora.rank=16", f"out={tmp_path / 'out'}"]
    words = [*grpo, "servers=2", "gpus_per_server=4", "server_command={vllm} --max-model-len 512"]
    asked = read(LaunchRay, None, words, partial(_served, None))
    assert asked.run.rollout.engine == "server"
    assert "rollout" not in " ".join(asked.words)
    (servers,) = _servers(asked.launcher, asked.run)
    command = servers.command
    assert " vllm serve m --served-model-name policy --host {host} --port {port} " in command
    assert (
        " --enable-lora --max-lora-rank 16 --tensor-parallel-size 4 --max-model-len 512" in command
    )
    for more, problem in (
        ("rollout.urls=http://a:1/v1", "servers=2 and rollout.urls: Ray starts servers"),
        ("rollout.engine=local", "servers=2 and rollout.engine: Ray starts servers"),
        ("colocate=true", "gpus_per_server=4 and 1 ranks, gpus_per_node=1; expected a rank on"),
    ):
        with pytest.raises(ConfigError) as caught:
            ray(None, [*words, more])
        assert problem in str(caught.value)


def test_servers_on_the_gpus_of_the_ranks_sleep_and_ask_ray_for_none(tmp_path: Path) -> None:
    words = [*KEYS, "method=grpo", "rewards=math", f"out={tmp_path / 'out'}", "nodes=2"]
    words += ["gpus_per_node=8", "servers=4", "gpus_per_server=4", "colocate=true"]
    asked = read(LaunchRay, None, words, partial(_served, None))
    assert asked.run.rollout.server.sync.sleep
    (kind,) = _servers(asked.launcher, asked.run)
    assert kind.command.endswith(" --tensor-parallel-size 4 --enable-sleep-mode")
    request = _request_at(kind, Place("ab" * 28, ("4", "5", "6", "7")))
    where = request.pop("scheduling_strategy")
    assert (where.node_id, where.soft) == ("ab" * 28, False)
    assert request == {"num_cpus": 0, "num_gpus": 0, "max_restarts": 3}
    for more, problem in (
        ("servers=3", "colocate=true with servers=3, gpus_per_server=4 and 16 ranks"),
        ("min_workers=8", "colocate=true with 8 to 16 ranks"),
        (
            "cpus_per_server=2",
            "cpus_per_server=2 with colocate=true: servers take what the ranks have",
        ),
        ("rollout.lag=1", "rollout.lag=1 with rollout.server.sync.sleep=true"),
    ):
        others = [word for word in words if not word.startswith(more.partition("=")[0] + "=")]
        with pytest.raises(ConfigError) as caught:
            ray(None, [*others, more])
        assert str(caught.value).startswith(problem)


def test_a_run_asks_reward_servers_at_the_url_that_its_settings_name(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'method = "grpo"\n[[rewards]]\nname = "reward_server"\noptions.url = "{reward_servers}"\n'
    )
    words = [*KEYS, f"out={tmp_path / 'out'}", "reward_servers=2", "gpus_per_reward_server=0"]
    words += ["reward_server_command={serve} rm"]
    asked = read(LaunchRay, file, words, partial(_served, file))
    assert asked.run.rewards[0].options == {"url": "http://reward-servers"}
    (servers,) = _servers(asked.launcher, asked.run)
    assert (servers.wanted, servers.one) == ("2 reward servers", {"CPU": 1.0})
    assert servers.command.endswith(
        " serve-reward host={host} port={port} 'hosts=[{door}]' without_key=true rm"
    )
    (word,) = _named_in_file(file, asked.words)
    doors = Doors("127.0.0.1", [servers])
    try:
        made = pointed(Job([*asked.words, word], "", {}, 0), doors)
    finally:
        doors.close()
    (_, port) = doors.addresses["reward server"][0]
    run = load(class_of(file, ["method=grpo"]), file, made.words[2:])
    assert run.rewards[0].options == {"url": f"http://127.0.0.1:{port}"}
    other = 'rewards=[{name = "judge", options.url = "{reward_servers}/v1"}]'
    assert _named_in_file(file, [*asked.words, other]) == []
    assert read(LaunchRay, file, [*words, other], partial(_served, file)).run.rewards[
        0
    ].options == {"url": "http://reward-servers/v1"}


def test_out_is_required_and_not_reused_unasked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="out is not set"):
        ray(None, KEYS)
    (tmp_path / "resolved.json").write_text("{}")
    with pytest.raises(OutputError, match="say resume=true to go on"):
        ray(None, [*KEYS, f"out={tmp_path}"])


def test_without_ray_one_line_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "ray" else real(name))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["launch", "ray", *KEYS, "out=x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("taut: error: taut launch ray needs ray, not installed here; ")
    assert "[ray]" in line
