"""Process start-up: who takes part, and whether all are about to run the same program."""

import contextlib
import hashlib
import json
import os
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import metadata
from random import Random
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtp.errors import (
    BadProcesses,
    CommunicationTimeout,
    ProcessesDisagree,
    join,
    warn,
)
from jaxtp.errors.arguments import MAPPING, checked, number
from jaxtp.processes import faults
from jaxtp.processes.launch import Launch, read_launch, split_address
from jaxtp.processes.roster import Roster

PORT_DISTANCE = 4096
"""From JAX's port to the roster's. Under Slurm JAX takes 61440 and up, one for each job, so no job
meets the ports of another."""

LOCAL_FLAGS = (
    "visible_devices", "dir", "path", "file", "log", "dump", "cache", "timeout", "address",
    "traceback", "mtls", "num_cpu_devices", "pprint", "explain", "debug_info",
)  # fmt: skip
"""Words in the names of jax flags that may differ between processes."""

SHARED_PACKAGES = (
    "jax", "jaxlib", "flax", "jaxtp", "numpy", "optax", "orbax-checkpoint", "grain", "tokenizers",
    "ml_dtypes", "jax-cuda12-plugin", "jax-cuda13-plugin",
)  # fmt: skip
"""Packages that decide what a step computes, in which order data come, or what a checkpoint is."""

SHARED_VARIABLES = ("XLA_FLAGS", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
"""Environment variables that change programs, or how their collectives talk to each other."""

_counts: Counter[str] = Counter()
"""Times that each key was gathered, so that all processes number their calls alike."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    cpu_devices: int | None = None,
    timeout: float = 300.0,
    heartbeat_timeout: float = 60.0,
) -> None:
    """Joins the processes of a run; call it first, before anything touches a device.

    Arguments win over `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` and
    `JAX_LOCAL_DEVICE_IDS`, and those over what Slurm (`srun`), Open MPI or Kubernetes say. For a
    process that runs alone it only sets `cpu_devices`, and called again it does nothing. Where
    `jax.distributed` runs already, what it does not do is added.

    One process per GPU is the rule. Two terminals on one machine, where that has GPUs also with
    JAX_LOCAL_DEVICE_IDS=0 and =1:

        JAX_COORDINATOR_ADDRESS=localhost:12345 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 python train.py
        JAX_COORDINATOR_ADDRESS=localhost:12345 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1 python train.py

    Then every process sends heartbeats to process 0. When one is lost, the others end with TP002
    and exit code 75, from a thread, whatever they are doing: a process that waits for its devices
    can do nothing else. The same happens when one ends by an exception that nothing catches;
    `atexit` handlers registered before this call do not run then. Process 0 prints the topology.

    Args:
        coordinator_address: HOST:PORT of process 0. The processes sign in, and beat, on that port
            + 4096, or - 4096 if it is above 8192.
        num_processes: Of the run.
        process_id: This one's number, from 0.
        local_device_ids: The GPUs to use, by default the one of this task.
        cpu_devices: Devices to simulate where there is no GPU, over all processes.
        timeout: Seconds until every process must have come.
        heartbeat_timeout: Seconds of silence after which a process counts as lost; one that crashes
            is noticed within 3 s.

    Raises:
        BadProcesses: TP015, for arguments or a launch that cannot work or leaves GPUs idle, and for
            a port that another program listens on.
        CommunicationTimeout: TP002, naming the processes that did not come in time.
        ProcessesDisagree: TP014, if versions or flags of jax differ.
    """
    if faults.run.roster is not None:
        return
    ids = None if local_device_ids is None else tuple(local_device_ids)
    given = Launch(
        address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=ids,
    )
    has_joined = jax.distributed.is_initialized()
    launch = given if has_joined else read_launch(given)
    if cpu_devices is not None:
        _simulate(cpu_devices, launch.num_processes or 1 if launch else 1)
    if launch is None:
        return
    faults.catch()
    roster = None
    if launch.address is not None and not has_joined:
        roster = _sign_in(launch, timeout, heartbeat_timeout, is_port_free=port_is_free)
    with _time_limit(timeout, launch.address):
        if not has_joined:
            _join(launch, timeout, heartbeat_timeout)
        if roster is None:
            roster = _sign_in(_found_by_jax(), timeout, heartbeat_timeout)
    faults.watch(roster)
    agree({})
    _check_devices()
    hosts = gather("topology", platform.node())
    if roster.process == 0:
        print(_topology(hosts), flush=True)  # noqa: T201


def _simulate(cpu_devices: int, num_processes: int) -> None:
    if cpu_devices % num_processes:
        raise BadProcesses(
            f"{cpu_devices} simulated devices do not divide over {num_processes} processes",
            fix=f"a multiple of {num_processes}, or another number of processes",
        )
    jax.config.update("jax_num_cpu_devices", cpu_devices // num_processes)


def _sign_in(
    launch: Launch,
    timeout: float,
    heartbeat_timeout: float,
    *,
    is_port_free: Callable[[int], bool] = lambda _: True,
) -> Roster:
    """The roster, with every process on it.

    Args:
        launch: Complete.
        timeout: Seconds until every process must have come.
        heartbeat_timeout: Of the roster.
        is_port_free: Whether JAX's service, which is yet to start, can have its port.
    """
    assert launch.address is not None
    assert launch.num_processes is not None
    assert launch.process_id is not None
    host, jax_port = split_address(launch.address)
    port = roster_port(jax_port)
    is_first = launch.process_id == 0
    try:
        roster = Roster(
            (host, port), launch.process_id, launch.num_processes, limit=heartbeat_timeout
        )
    except BadProcesses as error:
        raise BadProcesses(error.what, fix=_another_port(host)) from None
    start = time.monotonic()
    # JAX crashes process 0 where its port is taken, and the others would wait for it.
    taken = is_first and not is_port_free(jax_port)
    said = roster.gather(
        "sign-in", [platform.node(), _another_port(host) if taken else ""], timeout
    )
    seconds = time.monotonic() - start
    came = {process: node for process, (node, _) in said.items()}
    if not came:
        raise CommunicationTimeout(
            f"process {launch.process_id} ({platform.node()}) did not reach process 0 at "
            f"{host}:{port} in {seconds:.0f} s",
            where="start-up",
            fix="look whether process 0 runs, and whether a firewall closes that port",
        )
    if fix := said.get(0, ("", ""))[1]:
        raise BadProcesses(
            f"process 0 cannot listen on port {jax_port} of {came[0]}: another program does",
            fix=fix,
        )
    missing = [i for i in range(launch.num_processes) if i not in came]
    if missing:
        there = join(f"{i} on {name}" for i, name in sorted(came.items()))
        raise CommunicationTimeout(
            f"{_processes(missing)} of {launch.num_processes} did not come in {seconds:.0f} s; "
            f"there are {there}",
            where="start-up",
            fix="look for them in the launcher's log; a longer timeout= if hosts start slowly",
        )
    return roster


def roster_port(port: int) -> int:
    """The port of the roster beside JAX's."""
    return port + (PORT_DISTANCE if port <= 2 * PORT_DISTANCE else -PORT_DISTANCE)


def port_is_free(port: int) -> bool:
    """Whether this process could listen on a port of this machine, on every address of it."""
    families = [(socket.AF_INET, "")]
    families += [(socket.AF_INET6, "")] if socket.has_dualstack_ipv6() else []
    try:
        for family, host in families:
            # What a run before this one leaves behind for a minute (TIME_WAIT) is not in the way.
            with socket.socket(family, socket.SOCK_STREAM) as asked:
                asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                asked.bind((host, port))
                asked.listen()
    except OSError:
        return False
    return True


def _another_port(host: str) -> str:
    """An address whose two ports are free on this machine, which is process 0's."""
    random = Random()
    for _ in range(100):
        # Below the ports that Linux gives to outgoing connections, 32768 and up.
        port = random.randrange(10000, 32768 - PORT_DISTANCE)
        if port_is_free(port) and port_is_free(roster_port(port)):
            return f"another coordinator's address on every process, such as {host}:{port}"
    return "another port in the coordinator's address, on every process"


@contextlib.contextmanager
def _time_limit(seconds: float, address: str | None) -> Generator[None]:
    """TP002 if the block takes longer; JAX would end the process by SIGABRT, or wait for ever."""
    advice = (
        f"look whether a firewall closes {address} to the other hosts"
        if address
        else "give coordinator_address=, so that missing processes can be named"
    )

    def give_up() -> None:
        faults.stop(
            CommunicationTimeout(
                f"jax.distributed did not start in {seconds:.0f} s",
                where="start-up",
                fix=f"{advice}; look at the launcher's log, and set NCCL_DEBUG=WARN",
            )
        )

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join(launch: Launch, timeout: float, heartbeat_timeout: float) -> None:
    # Of programs that run at the same time, gloo mixes up the collectives: with the jaxlib of jax
    # 0.10 some processes then wait for ever. For CPU devices only.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # JAX's limits come later than jaxtp's own, which say who it was.
    jax.distributed.initialize(
        launch.address,
        launch.num_processes,
        launch.process_id,
        local_device_ids=launch.local_device_ids,
        initialization_timeout=int(timeout) + 30,
        heartbeat_timeout_seconds=int(2 * heartbeat_timeout) + 30,
        shutdown_timeout_seconds=30,
    )


def _found_by_jax() -> Launch:
    """The launch that JAX has found; process 0 tells the others where it is, over the devices."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # sends nothing; says which network leads outside
            host = asked.getsockname()[0]
        except OSError:
            host = platform.node()
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    text = np.frombuffer(f"{host}:{port}".ljust(128).encode(), np.uint8)
    address = bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))).decode().strip()
    return Launch(
        address=address, num_processes=jax.process_count(), process_id=jax.process_index()
    )


def gather(key: str, value: Any, timeout: float = 60.0) -> dict[int, Any]:
    """What every process gives under a key; also a barrier with a time limit.

    Args:
        key: The same in every process.
        value: Anything JSON can hold.
        timeout: Seconds until every process must have given its value.

    Returns:
        Process -> value, of all processes; the own value alone for a process that runs alone.

    Raises:
        CommunicationTimeout: TP002, naming the processes that did not.
    """
    roster = faults.run.roster
    if roster is None:
        return {0: value}
    _counts[key] += 1
    values = roster.gather(f"{key} {_counts[key]}", value, timeout)
    missing = [i for i in range(roster.num_processes) if i not in values]
    if missing:
        raise faults.lost_error(f"{_processes(missing)} did not come to {key!r} in {timeout:.0f} s")
    return values


ARRAY = "values of "
"""How the name of a fact begins that is the digest of an array."""


@checked(facts=MAPPING, timeout=number(above=0))
def agree(facts: Mapping[str, object], *, timeout: float = 60.0) -> None:
    """Checks that all processes give the same facts, and have the same versions and flags.

    Every process calls it at the same point, before the first collective of a program; for a
    process that runs alone it does nothing.

    Args:
        facts: Name -> value, e.g. settings, the hash of a plan; compared as text.
        timeout: Seconds until every process must have called it.

    Raises:
        ProcessesDisagree: TP014, on every process, with each difference and who has which value.
        CommunicationTimeout: TP002, naming the processes that did not call it in time.
        BadConfig: TP020, if the facts are no dict, or the timeout is no number above 0.
    """
    mine = {**process_facts(), **{str(name): str(value) for name, value in facts.items()}}
    text = json.dumps(mine, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    camps: dict[str, list[int]] = {}
    for process, other in sorted(gather("agreement", digest, timeout).items()):
        camps.setdefault(other, []).append(process)
    if len(camps) > 1:
        # One of each camp will do: thousands of processes would send each other gigabytes.
        speaks = camps[digest][0] == faults.own_number()
        said = gather("disagreement", mine if speaks else None, timeout)
        _disagree([(ids, said[ids[0]]) for ids in camps.values()])


def process_facts() -> dict[str, str]:
    """Versions, flags of jax and variables that must be the same in every process."""
    return {
        "python": platform.python_version(),
        **{f"version of {name}": _version(name) for name in SHARED_PACKAGES},
        **{name: os.environ.get(name, "") for name in SHARED_VARIABLES},
        **{
            name: str(value)
            for name, value in jax.config.values.items()
            if not any(word in name for word in LOCAL_FLAGS)
        },
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


def _disagree(camps: Sequence[tuple[list[int], Mapping[str, str]]]) -> NoReturn:
    lines: list[str] = []
    for name in sorted({name for _, mine in camps for name in mine}):
        holders: dict[str, list[int]] = {}
        for ids, mine in camps:
            holders.setdefault(mine.get(name, "not given"), []).extend(ids)
        if len(holders) > 1:
            sides = (f"{value} on {_processes(sorted(ids))}" for value, ids in holders.items())
            lines.append(f"{name}: {', '.join(sides)}")
    fix = "start every process with the same files, flags, environment and versions"
    if any(line.startswith(ARRAY) for line in lines):
        fix = (
            "give every process the same seed and the same global batch; rows that a process has "
            "read for itself become one by jaxtp.shard_batch(rows, mesh, local=True)"
        )
    raise ProcessesDisagree(
        f"the processes differ in {len(lines)} facts:\n  " + "\n  ".join(lines[:20]), fix=fix
    )


def _check_devices() -> None:
    """Warns of a process with several GPUs, which no launcher was asked about."""
    local = jax.local_devices()
    if len(local) > 1 and local[0].platform == "gpu":
        warn(
            f"TP015: process {jax.process_index()} has {len(local)} GPUs; one process per GPU is "
            "the rule: start more processes, each with its own local_device_ids",
        )


def _topology(hosts: Mapping[int, str]) -> str:
    """One line for each host: its processes and its devices by kind."""
    lines: list[str] = []
    for host in sorted(set(hosts.values())):
        here = sorted(process for process, name in hosts.items() if name == host)
        kinds = Counter(d.device_kind for d in jax.devices() if d.process_index in here)
        listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        lines.append(f"  {host}: {_processes(here)} with {listed}")
    places = f"{len(lines)} host{'s' * (len(lines) > 1)}"
    head = f"{len(hosts)} processes on {places}, {jax.device_count()} devices"
    return "\n".join((head, *lines))


def _processes(ids: Sequence[int]) -> str:
    return f"process{'es' * (len(ids) > 1)} {join(ids)}"
