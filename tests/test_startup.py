"""Start-up and agreement, with the other processes played by threads; real ones are in the leg."""

import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import pytest

import jaxtp
from jaxtp.errors import BadProcesses, CommunicationTimeout, ProcessesDisagree
from jaxtp.processes import faults, startup
from jaxtp.processes.launch import Launch
from jaxtp.processes.roster import Roster
from jaxtp.processes.startup import gather, port_is_free, process_facts, roster_port

WORKER = Path(__file__).parent / "process_runs.py"


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def rosters(count, **options):
    port = free_port()
    return [Roster(("localhost", port), i, count, limit=1.0, **options) for i in range(count)]


def together(functions):
    """What each function returns, all of them called at once."""
    results = [None] * len(functions)

    def call(i):
        results[i] = functions[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_all_learn_what_each_gave():
    found = together([lambda r=r: r.gather("x", r.process * 10, 5.0) for r in rosters(3)])
    assert found == [{0: 0, 1: 10, 2: 20}] * 3


def test_who_is_missing_is_known_to_all_at_the_same_time():
    zero, one, _ = rosters(3)
    found = together([lambda: zero.gather("x", "a", 0.5), lambda: one.gather("x", "b", 30.0)])
    assert found == [{0: "a", 1: "b"}] * 2


def test_two_processes_of_one_number_are_refused():
    zero, one = rosters(2)
    together([lambda: zero.gather("x", 0, 5.0), lambda: one.gather("x", 1, 5.0)])
    other = Roster(zero._address, 1, 2, limit=1.0)
    with pytest.raises(BadProcesses, match="TP015: process 1 has already started on "):
        other.gather("y", 1, 0.3)


def test_a_port_in_use_is_refused():
    zero, _ = rosters(2)
    with pytest.raises(BadProcesses, match=r"cannot listen on port \d+: .* in use"):
        Roster(("localhost", zero._address[1]), 0, 2, limit=1.0)


def test_a_port_of_another_program_is_refused_by_all_with_one_that_is_free():
    with socket.create_server(("", 0)) as other:
        taken = other.getsockname()[1]
        assert not port_is_free(taken)
        address = f"localhost:{taken}"
        launches = [Launch(address=address, num_processes=2, process_id=i) for i in range(2)]

        def sign_in(launch):
            with pytest.raises(BadProcesses, match=f"cannot listen on port {taken} of ") as caught:
                startup._sign_in(launch, 5.0, 1.0, is_port_free=port_is_free)
            return caught.value.fix

        first, second = together([lambda launch=launch: sign_in(launch) for launch in launches])
    assert first == second
    port = int(first.rpartition("localhost:")[2])
    assert port_is_free(port)
    assert port_is_free(roster_port(port))


def test_what_is_not_a_message_does_no_harm():
    zero, one = rosters(2)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"process": 9, "host": "", "token": ""}\n'):
        with socket.create_connection(zero._address, 5) as connection:
            connection.sendall(text)
            assert connection.recv(100) == b""
    found = together([lambda: zero.gather("x", 0, 5.0), lambda: one.gather("x", 1, 5.0)])
    assert found == [{0: 0, 1: 1}] * 2


def test_a_silent_process_is_lost():
    zero, one, two = rosters(3)
    losses, told, over, beats = [], threading.Event(), threading.Event(), iter([{"done": "step 7"}])

    def note(lost):
        losses.extend(lost)
        told.set()

    def said():
        for beat in beats:
            return beat
        over.wait(20)  # the second beat does not come, as of a process that is stopped
        return {}

    zero.beat(dict, note)
    one.beat(said, note)
    assert told.wait(10)
    over.set()
    assert [(peer.process, peer.state, peer.said) for peer in losses] == [
        (1, "here", {"done": "step 7"})
    ]
    assert 1.0 < losses[0].silent < 8.0
    assert [peer.state for peer in two.peers()][2] == "absent"


def test_a_goodbye_is_no_loss():
    zero, one = rosters(2)
    losses = []
    for roster in (zero, one):
        roster.beat(dict, losses.append)
    together([lambda: zero.leave(20.0), lambda: time.sleep(0.3) or one.leave(20.0)])
    time.sleep(0.3)
    assert losses == []
    assert [peer.state for peer in zero.peers()] == ["left", "left"]


def test_a_failed_process_tells_why():
    zero, one = rosters(2)
    losses, told = [], threading.Event()

    def note(lost):
        losses.extend(lost)
        told.set()

    zero.beat(dict, note)
    one.beat(dict, note)
    one.fail("no more text", 0.0)
    assert told.wait(10)
    assert [(p.process, p.state, p.said["failed"]) for p in losses] == [(1, "gone", "no more text")]


def test_agreement_of_equal_and_different_facts(monkeypatch):
    zero, one = rosters(2)
    monkeypatch.setattr(faults.run, "roster", zero)
    monkeypatch.setattr(startup, "_counts", startup.Counter())
    other = {**process_facts(), "steps": "200", "jax_enable_x64": "True"}
    thread = threading.Thread(
        target=lambda: [one.gather("agreement 1", "x", 5), one.gather("disagreement 1", other, 5)]
    )
    thread.start()
    with pytest.raises(ProcessesDisagree) as caught:
        jaxtp.agree({"steps": 100})
    thread.join()
    text = str(caught.value)
    assert "TP014: the processes differ in 2 facts:" in text
    assert "jax_enable_x64: False on process 0, True on process 1" in text
    assert "steps: 100 on process 0, 200 on process 1" in text


def test_a_barrier_names_who_did_not_come(monkeypatch):
    zero, _ = rosters(2)
    monkeypatch.setattr(faults.run, "roster", zero)
    with pytest.raises(CommunicationTimeout, match=r"TP002 .*process 1 did not come to 'save'"):
        gather("save", True, timeout=0.2)


def test_alone_there_is_nothing_to_do():
    before = jax.config.jax_num_cpu_devices
    jaxtp.initialize()
    jaxtp.initialize(cpu_devices=before)
    jaxtp.agree({"steps": 1})
    assert gather("x", 3) == {0: 3}
    assert faults.run.roster is None
    assert not jax.distributed.is_initialized()


def test_simulated_devices_divide_over_processes():
    with pytest.raises(BadProcesses, match="6 simulated devices do not divide over 4 processes"):
        jaxtp.initialize("localhost:1", 4, 0, cpu_devices=6)


def test_a_process_with_several_gpus_is_named(monkeypatch):
    gpus = [types.SimpleNamespace(platform="gpu")] * 8
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    with pytest.warns(jaxtp.JaxtpWarning, match="TP015: process 0 has 8 GPUs; one process per GPU"):
        startup._check_devices()


def test_one_of_two_never_comes():
    address = f"localhost:{free_port()}"
    run = subprocess.run(
        [sys.executable, WORKER, "join", address, "2", "0", "timeout=1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 75
    assert "TP002 at start-up: process 1 of 2 did not come in 1 s; there are 0 on " in run.stderr
