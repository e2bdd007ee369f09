"""Place ranks with Ray, which notices dead ones and starts them again. Only the files of this room import ray.

    connect -> is there room? -> look at every node        placement.py
    servers next to the ranks, if any are requested        ray_servers.py
    TorchTrainer: on every worker a rank process, its exit code

Ray Train starts one worker a rank, forms their group, and starts all of them again, as many as there is room for, when
one fails (https://docs.ray.io, ``ray.train.torch.TorchTrainer``). A worker only supervises: the rank is a process of
its own (rank_process.py), which ends by exit codes and signals as under torchrun and knows nothing of Ray. Between the
workers and the command is one actor (relay.py): lines and exit codes come, signals go.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import ray

from taut.errors import ClusterError, Interrupted, RankFailed
from taut.train.signals import Interrupts
from taut_tools.cluster.attempts import STATED, Attempt
from taut_tools.cluster.placement import (
    Ranks,
    connect,
    here,
    is_short,
    no_room,
    require_fit,
    require_room,
)
from taut_tools.cluster.preflight import Expected, free_port, port_in_use
from taut_tools.cluster.rank_process import RankProcess, Stream
from taut_tools.cluster.ray_servers import PlacedServers, pointed, serving
from taut_tools.cluster.relay import BEAT, Job, print_lines, start_relay
from taut_tools.cluster.servers import Place, Servers


def launch(
    job: Job,
    ranks: Ranks,
    expected: Expected,
    kinds: Sequence[Servers] = (),
    *,
    address: str | None,
    restarts: int,
    wait: float,
    resize_every: float,
) -> int:
    """Run the job on a cluster; its exit code. ``kinds`` are servers that run as long, whose URLs the run's words get.
    Raises ClusterError where there is no room or a node does not fit, and RankFailed where ranks have died more than
    ``restarts`` times.
    """
    connect(address, ranks, kinds)
    with Interrupts.watching() as interrupts:
        try:
            with interrupts.at_once():
                group = require_room(ranks, kinds, wait)
                require_fit(expected, ranks, kinds)
                waits = any(kind.is_colocated for kind in kinds)
                job = replace(job, relay=start_relay(4 * ranks.most + 16), waits=waits)
            with serving(job, kinds, group, interrupts) as placed:
                return _run(
                    pointed(job, placed.doors),
                    ranks,
                    expected.folder,
                    interrupts,
                    placed,
                    restarts,
                    wait,
                    resize_every,
                )
        finally:
            ray.shutdown()


def _run(
    job: Job,
    ranks: Ranks,
    folder: str,
    interrupts: Interrupts,
    placed: PlacedServers,
    restarts: int,
    wait: float,
    resize_every: float,
) -> int:
    """Start the trainer; pass on its lines and the terminal's signals until it ends; the exit code."""
    # Ray Train starts a worker for each rank, and all of them again when one fails.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = f"{wait:g}"
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    relay = job.relay
    trainer = TorchTrainer(
        partial(_supervise, job),
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
        scaling_config=ScalingConfig(
            num_workers=(ranks.fewest, ranks.most) if ranks.is_elastic else ranks.most,
            resources_per_worker=ranks.one,
            use_gpu=bool(ranks.gpus),
            elastic_resize_monitor_interval_s=resize_every,
            placement_strategy="SPREAD" if ranks.per_node == 1 else "PACK",
        ),
        run_config=RunConfig(
            name="train",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=restarts),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    # It runs in a thread, so that signals reach the command.
    failures: list[Exception] = []
    fit = threading.Thread(target=_fit, args=(trainer, failures), daemon=True)
    fit.start()
    passed = False
    while fit.is_alive():
        fit.join(BEAT)
        silence = print_lines(relay)
        placed.lead()
        placed.follow_ranks()
        if interrupts.received is not None and not passed:
            number = int(signal.Signals[interrupts.received])
            passed = ray.get(relay.pass_on.remote(number))
            if not passed:  # nothing runs that could save anything
                interrupts.check()
        if silence > wait and is_short(ranks):
            raise ClusterError(no_room(ranks, (), wait))
    print_lines(relay)
    # The last attempt says how the launch ends.
    attempt: Attempt | None
    attempt, count = ray.get(relay.last.remote())
    if attempt is None:
        interrupts.check()
        cause = " ".join(str(failures[0] if failures else "").split())[-300:]
        raise ClusterError(
            f"Ray started no rank ({cause}); expected workers that meet; see the logs of its session"
        )
    signaled = interrupts.received
    why = attempt.failure(None if signaled is None else int(signal.Signals[signaled]))
    if why is not None and failures:
        raise RankFailed(
            f"{why}, after {count - 1} restart{'s' * (count != 2)} (restarts={restarts}); expected the ranks to run to "
            "the end; see their lines above; the same command with resume=true continues"
        )
    return attempt.exit_code


def _fit(trainer: Any, failures: list[Exception]) -> None:
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - looked at in the main thread
        failures.append(error)


def _supervise(job: Job) -> None:
    """Run a rank from a worker of Ray Train, with its lines and signals handed on, until it ends. Raises RuntimeError,
    at which Ray Train starts another attempt, where one has to follow.
    """
    import torch.distributed as dist
    from ray.train import get_context

    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    host = os.environ["MASTER_ADDR"]
    # Rank 0 begins the attempt, and tells the others its number and port. Without a port all end with an error.
    shared: list[Any] = [None]
    if rank == 0:
        number = ray.get(job.relay.begin.remote(size))
        if job.port and port_in_use(host, job.port):
            line = f"{STATED}port {job.port} of {host} is in use; expected a free one; set port=0 for any\n"
            ray.get(job.relay.say.remote(number, [("stderr", line)]))
            shared = [(number, None)]
        else:
            shared = [(number, job.port or free_port(host))]
    dist.broadcast_object_list(shared)
    number, port = shared[0]
    # Tell the relay where this rank is, run it, and tell how it ended.
    _, node = here()
    devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    place = Place(ray.get_runtime_context().get_node_id(), tuple(devices))
    ray.get(job.relay.join.remote(number, rank, node, place))
    code = 2 if port is None else _run_rank(job, number, port)
    failure = ray.get(job.relay.ended.remote(number, rank, code))
    if failure is not None:
        raise RuntimeError(failure)


def _run_rank(job: Job, number: int, port: int) -> int:
    """Start the rank once its servers are ready, and supervise it; its exit code."""
    relay = job.relay
    while job.waits and not ray.get(relay.is_released.remote(number)):
        if ray.get(relay.heed.remote(number)) is not None:
            return Interrupted.exit_code
        time.sleep(BEAT)
    lines: SimpleQueue[tuple[Stream, str]] = SimpleQueue()
    process = RankProcess(
        job.words,
        {**job.environment, "MASTER_PORT": str(port)},
        job.directory,
        lambda stream, line: lines.put((stream, line)),
    )
    passed = False
    while process.is_alive:
        time.sleep(BEAT)
        _hand_on(relay, number, lines)
        received = ray.get(relay.heed.remote(number))
        if received is not None and not passed:
            process.signal(received)
            passed = True
    code = process.wait()
    _hand_on(relay, number, lines)
    return code


def _hand_on(relay: Any, number: int, lines: SimpleQueue[tuple[Stream, str]]) -> None:
    waiting = [lines.get() for _ in range(lines.qsize())]
    if waiting:
        ray.get(relay.say.remote(number, waiting))
