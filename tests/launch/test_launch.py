"""Ranks in real processes: how they start, how they end, what the caller gets to know."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import launch_workers as workers
import pytest
import torch

from cdp_repro.launch import LaunchError, RankFailedError, launch, local_ranks
from cdp_repro.launch.fork_server import ForkedRanks
from cdp_repro.launch.process_group import _limit_silence_of_the_store, process_group, refuse_differing
from cdp_repro.launch.signals import StopRequest

STARTERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
LONG = 30.0
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in [*STARTERS, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def numbered(environment):
    """Return a function that sets the environment of a rank."""

    def set_rank(rank: int, world_size: int, port: int) -> None:
        values = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            environment.setenv(name, str(value))

    return set_rank


def own_rank():
    return {name: os.environ.get(name) for name in STARTERS}


def pids(folder: Path, what: str = "pid") -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob(f"{what}-*"))]


def parent(pid: int) -> int:
    return int(re.search(r"^PPid:\s*(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1])


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# What comes back


def test_rank_0_answers_and_ranks_share_the_cores(environment, capfd):
    answer = launch(workers.add, [10], 2, imports=["torch"])
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert answer == {
        "rank": 0, "local_rank": "0", "total": 21, "threads": threads, "unpicklable elsewhere": None
    }  # fmt: skip
    assert "RANK" not in os.environ and "OMP_NUM_THREADS" not in os.environ
    environment.setenv("OMP_NUM_THREADS", "7")
    assert launch(workers.threads, [], 2) == "7"
    assert capfd.readouterr() == ("", "")


def test_what_ranks_need_is_imported_before_they_are_forked():
    assert launch(workers.already_imported, ["colorsys"], 2, imports=["colorsys"]) == (True, False)
    assert launch(workers.already_imported, ["colorsys"], 2) == (False, False)


def test_the_process_that_starts_ranks_imports_no_torch():
    """It has nothing to compute: torch would only delay its ranks by seconds."""
    code = (
        "import sys; from cdp_repro.launch import launch; import launch_workers as workers\n"
        "print(launch(workers.add, [10], 2)['total'], 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["21", "False"]


def test_ranks_end_if_their_store_cannot_be_served(capfd):
    """Else they would wait for it, and the process that has forked them for them."""
    no_port, other = socket.socketpair()
    with other:
        ranks = ForkedRanks(workers.wait_for_ever, [], {}, [{}, {}], [], no_port)
        try:
            deadline = time.monotonic() + 60
            while ranks.running and time.monotonic() < deadline:
                ranks.wait(1.0)
            assert ranks.exit_codes == {0: 1, 1: 1}
        finally:
            ranks.end()
    assert "IndexError" in capfd.readouterr().err


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="asks the kernel of Linux")
def test_the_store_listens_on_this_machine_only():
    assert launch(workers.addresses_of_the_store, [], 2) == ["0100007F"], "127.0.0.1, and nothing else"


def test_one_process_is_this_one():
    assert launch(os.getpid, [], 1) == os.getpid()


def test_own_exceptions_come_back_whole():
    with pytest.raises(workers.TwoPartError, match=r"^at step 7$") as caught:
        launch(workers.raise_own, [(1,)], 2)
    assert (caught.value.step, caught.value.rank) == (7, 1)


def test_of_equal_exceptions_that_of_rank_0_counts_though_it_comes_later():
    with pytest.raises(workers.TwoPartError) as caught:
        launch(workers.raise_own, [(0, 1)], 2)
    assert caught.value.rank == 0


def test_an_exception_that_cannot_come_is_shown():
    with pytest.raises(RankFailedError, match="LockedError: with a lock"):
        launch(workers.raise_locked, [], 2)


# Failures end all ranks


def check_end(folder: Path, started: float, ranks: int) -> None:
    found = pids(folder)
    assert len(found) == ranks and not any(map(is_running, found))
    assert time.monotonic() - started < LONG


def test_an_exception_ends_the_rank_that_waits_for_a_message(tmp_path, capfd):
    started = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        launch(workers.raise_while_the_other_receives, [tmp_path], 2, imports=["torch"])
    check_end(tmp_path, started, ranks=2)
    assert (caught.value.rank, caught.value.signal_name) == (1, None)
    assert str(caught.value).startswith("rank 1 failed:\nTraceback")
    assert str(caught.value).count("ZeroDivisionError: the first cause") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_killed_rank_ends_all(tmp_path):
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"^rank 1 was killed by SIGKILL") as caught:
        launch(workers.die_at_a_random_moment, [tmp_path], 2, imports=["torch"])
    check_end(tmp_path, started, ranks=2)
    assert (caught.value.rank, caught.value.exit_code, caught.value.signal_name) == (1, None, "SIGKILL")


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_ends_without_a_word_ends_all(tmp_path, code):
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=f"^rank 1 ended with exit code {code} ") as caught:
        launch(workers.exit_without_a_word, [tmp_path, code], 2, grace_seconds=0.3)
    check_end(tmp_path, started, ranks=2)
    assert (caught.value.rank, caught.value.exit_code, caught.value.signal_name) == (1, code, None)


def test_a_lost_connection_is_not_the_first_cause(tmp_path):
    with pytest.raises(RankFailedError, match=r"^rank 1 ended with exit code 3 "):
        launch(workers.lose_a_peer_that_is_seen_to_end_later, [tmp_path], 2)


def test_a_stopped_rank_ends_when_another_fails(tmp_path):
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="ZeroDivisionError: beside a stopped one") as caught:
        launch(workers.fail_beside_a_stopped_rank, [tmp_path], 2, grace_seconds=1)
    check_end(tmp_path, started, ranks=2)
    assert caught.value.rank == 1


# Signals


@pytest.fixture
def command(tmp_path):
    """Return a function that starts a launching process, with a group of its own as a shell gives it."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, workers.__file__, arguments[0], str(tmp_path), *arguments[1:]],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_both(folder: Path, what: str = "pid") -> None:
    wait_until(lambda: len(list(folder.glob(f"{what}-*"))) == 2)


def wait_for_the_server(folder: Path) -> None:
    """Wait until what forks the ranks imports what they need."""
    wait_until(lambda: any(path.read_text() for path in folder.glob("importing-server")))


@pytest.mark.parametrize(
    ("number", "send"), [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill), (signal.SIGHUP, os.killpg)]
)
def test_a_signal_lets_the_ranks_finish(tmp_path, command, number, send):
    process = command("finish_when_asked", "0.5")
    wait_for_both(tmp_path)
    send(process.pid, number)
    assert process.communicate(timeout=LONG) == (f"rank 0 got signal {int(number)}\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_signal_ends_them(tmp_path, command, first):
    process = command("finish_when_asked", "60")
    wait_for_both(tmp_path)
    os.killpg(process.pid, first)
    wait_for_both(tmp_path, "asked")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LONG) == -signal.SIGINT
    wait_until(lambda: not any(map(is_running, pids(tmp_path))))


def test_a_closed_terminal_leaves_those_alone_that_ignore_it():
    for before in (signal.SIG_IGN, signal.SIG_DFL):
        was = signal.signal(signal.SIGHUP, before)
        try:
            with StopRequest() as stop:
                assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) is (before == signal.SIG_IGN)
                signal.raise_signal(signal.SIGHUP)
                assert stop.signal == (None if before == signal.SIG_IGN else signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == before
        finally:
            signal.signal(signal.SIGHUP, was)


def test_ranks_finish_that_get_sigterm_both_themselves_and_from_the_launching_process(tmp_path, command):
    process = command("finish_when_asked", "0.5")
    wait_for_both(tmp_path)
    for pid in (*pids(tmp_path), parent(pids(tmp_path)[0]), process.pid):  # as SLURM does, to all of a job
        os.kill(pid, signal.SIGTERM)
    wait_for_both(tmp_path, "asked")
    process.terminate()
    assert process.communicate(timeout=LONG) == ("rank 0 got signal 15\n", "")
    assert process.returncode == 0


def test_signals_end_ranks_that_do_not_expect_them_and_the_launching_process_with_them(tmp_path, command):
    process = command("wait_unprepared")
    wait_for_both(tmp_path)
    process.terminate()
    assert process.communicate(timeout=LONG) == ("", "")
    assert process.returncode == -signal.SIGTERM


def test_ranks_that_have_not_ended_in_the_grace_after_a_signal_are_killed_and_named(tmp_path, command, environment):
    environment.setenv("GRACE", "1")
    process = command("stop_for_ever")
    wait_for_both(tmp_path)
    process.terminate()
    shown = process.communicate(timeout=LONG)[1]
    assert "StalledError: of 2 ranks 0, 1 had not ended 1 s after SIGTERM, and were killed (grace_seconds=" in shown
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_ranks_at_once_that_have_not_even_started(tmp_path, command, environment, number):
    """They have nothing to save, and there is no store yet that could say where they stand."""
    environment.setenv("GRACE", "60")
    environment.setenv("SLOW_IMPORT", str(tmp_path))
    process = command("wait_unprepared")
    wait_for_the_server(tmp_path)
    began = time.monotonic()
    os.kill(process.pid, number)
    shown = process.communicate(timeout=LONG)[1]
    assert process.returncode == -number and "StalledError" not in shown
    assert time.monotonic() - began < 30, "not the grace"
    assert not [*tmp_path.glob("pid-*")], "no rank has begun"
    wait_until(lambda: not any(map(is_running, pids(tmp_path, "importing"))))


def test_a_store_that_is_not_there_yet_or_no_more_cannot_say_where_ranks_stand(monkeypatch):
    asked = []

    def gone(port):
        asked.append(port)
        raise RuntimeError("connection refused")

    monkeypatch.setattr(local_ranks, "store_at", gone)
    assert local_ranks._store_of(1) is None
    assert asked == [1]


def test_a_signal_to_a_rank_that_has_just_ended_is_no_error():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ranks = object.__new__(ForkedRanks)
    ranks.numbers, ranks.exit_codes, ranks._pids = range(1), {}, [ended.pid]
    assert ranks.send(signal.SIGTERM), "the news of its end have not been read yet"


def test_a_signal_that_comes_while_handlers_are_installed_is_a_request(monkeypatch):
    install, raised = signal.signal, []

    def at_once(number, handler):
        before = install(number, handler)
        if not raised:
            raised.append(number)
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", at_once)
    with StopRequest() as stop:
        assert [stop.signal] == raised


def test_ctrl_c_during_the_start_shows_one_traceback(tmp_path, command, environment):
    environment.setenv("SLOW_IMPORT", str(tmp_path))
    process = command("wait_unprepared")
    wait_for_the_server(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    shown = process.communicate(timeout=LONG)[1]
    assert process.returncode == -signal.SIGINT
    assert len(re.findall("^KeyboardInterrupt", shown, re.MULTILINE)) == 1 == shown.count("Traceback")


def test_no_rank_outlives_the_launching_process(tmp_path, command):
    process = command("wait_unprepared")
    wait_for_both(tmp_path)
    process.kill()
    wait_until(lambda: not any(map(is_running, pids(tmp_path))))


def test_ranks_that_lose_the_store_with_the_launching_process_say_nothing(tmp_path, command):
    process = command("ask_the_store")
    wait_for_both(tmp_path)
    process.kill()
    assert process.communicate(timeout=LONG) == ("", "")  # until the last rank has closed its end


def test_what_still_imports_for_the_ranks_does_not_outlive_it_either(tmp_path, command, environment):
    environment.setenv("SLOW_IMPORT", str(tmp_path))
    process = command("wait_unprepared")
    wait_for_the_server(tmp_path)
    process.kill()
    wait_until(lambda: not any(map(is_running, pids(tmp_path, "importing"))))
    assert not pids(tmp_path), "none has begun"


def test_ranks_end_with_what_has_forked_them(tmp_path, command):
    process = command("wait_unprepared")
    wait_for_both(tmp_path)
    os.kill(parent(pids(tmp_path)[0]), signal.SIGKILL)
    assert "RankFailedError: rank 0 was killed by SIGKILL" in process.communicate(timeout=LONG)[1]
    assert not any(map(is_running, pids(tmp_path)))


# Processes that others start


AGENT = """
import os, subprocess, sys
for rank in range(2):
    subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": str(rank)})
input()
"""


@pytest.mark.parametrize("moment", ["pid", "importing"])
def test_no_rank_outlives_the_agent_of_torchrun(tmp_path, numbered, environment, moment):
    numbered(0, 2, 1234)
    environment.setenv("TORCHELASTIC_RUN_ID", "a-run")
    if moment == "importing":
        environment.setenv("SLOW_IMPORT", str(tmp_path))
    start = [sys.executable, "-c", AGENT, workers.__file__, "wait_unprepared", str(tmp_path)]
    with subprocess.Popen(start, stdin=subprocess.PIPE) as agent:
        wait_until(lambda: len([each for each in tmp_path.glob(f"{moment}-*") if each.read_text()]) == 2)
        ranks = pids(tmp_path, moment)
        assert all(map(is_running, ranks))
        agent.kill()
    wait_until(lambda: not any(map(is_running, ranks)))


def test_torchrun_has_started_this_rank(numbered):
    numbered(1, 2, 1234)
    assert launch(own_rank, [], 2)["RANK"] == "1"
    assert launch(os.getpid, [], 2) == os.getpid()


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("cdp_repro.cli.verify", "-m cdp_repro.cli.verify workers=4 --steps=2"),
        ("cdp_repro.cli.train", "-m cdp_repro.cli.train workers=4 --steps=2"),
        (None, "/opt/bin/cdp-verify workers=4 --steps=2"),
    ],
)
def test_another_number_of_processes_is_refused_with_a_command_that_works(numbered, monkeypatch, module, command):
    numbered(0, 2, 1234)
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(module, None) if module else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/opt/bin/cdp-verify", "workers=4", "--steps=2"])
    with pytest.raises(LaunchError) as refused:
        launch(own_rank, [], 4)
    said = str(refused.value)
    assert said.startswith("2 processes have been started (WORLD_SIZE), but the run needs 4: use\n")
    assert f"\ntorchrun --nproc-per-node=4 {command}\n" in said
    with pytest.raises(LaunchError, match="needs 1: "):
        launch(own_rank, [], 1)


def under_srun(environment, **changed: str) -> None:
    values = {
        "PROCID": "5", "LOCALID": "1", "NTASKS": "8", "STEP_NODELIST": "gpu[007-008,12],login", "JOB_ID": "123456789",
        "STEP_ID": "3",
    }  # fmt: skip
    for name, value in {**values, **changed}.items():
        environment.setenv(f"SLURM_{name}", value)


def test_srun_has_started_this_rank(environment):
    under_srun(environment)
    found = launch(own_rank, [], 8)
    port = int(found.pop("MASTER_PORT"))
    assert found == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu007", "OMP_NUM_THREADS": None
    }  # fmt: skip
    assert 1024 < port < 32768 and "RANK" not in os.environ
    environment.setattr(sys, "orig_argv", ["python", "/bin/cdp-verify", "mode=dp"])
    with pytest.raises(
        LaunchError, match=r"\(SLURM_NTASKS\), .* 4: use\nsrun --ntasks=4 python /bin/cdp-verify mode=dp$"
    ):
        launch(own_rank, [], 4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("host", "host"), ("a,b[1-2]", "a"), ("n[3,5-6]-ib,x", "n3-ib"), ("r[1-2]n[04-05]", "r1n04")],
)
def test_the_first_host_of_a_list_is_that_of_rank_0(environment, nodes, first):
    under_srun(environment, STEP_NODELIST=nodes)
    assert launch(own_rank, [], 8)["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("visible", "on_node", "chosen"),
    [("0,1", "2", "1"), ("1", "2", "0"), ("0", "1", "1"), ("0", None, "1"), (None, "2", "1")],
)
def test_a_rank_takes_the_gpu_that_srun_has_given_to_it_alone(environment, visible, on_node, chosen):
    under_srun(environment)
    for name, value in {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": on_node}.items():
        if value is None:
            environment.delenv(name, raising=False)
        else:
            environment.setenv(name, value)
    assert launch(own_rank, [], 8)["LOCAL_RANK"] == chosen


def test_slurm_without_several_tasks_starts_no_ranks(environment):
    under_srun(environment, NTASKS="1", PROCID="0")
    assert launch(os.getpid, [], 2) != os.getpid()
    under_srun(environment)
    environment.delenv("SLURM_STEP_NODELIST")  # as in a batch script
    assert launch(own_rank, [], 1)["RANK"] is None


def test_the_shell_of_salloc_is_no_rank(environment):
    under_srun(environment)
    environment.setenv("SLURM_STEP_ID", str(0xFFFFFFFA))
    assert launch(own_rank, [], 1)["RANK"] is None


# The process group


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def join(processes: int, timeout_seconds: float) -> None:
    with process_group(CPU, processes, timeout_seconds):
        pytest.fail("there was nobody to meet")


def test_a_port_in_use_is_named(numbered):
    with closing(socket.create_server(("", 0))) as server:
        port = server.getsockname()[1]
        numbered(0, 2, port)
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}, the port is in use: set MASTER_PORT"):
            join(2, 5)


def test_an_unreachable_rank_0_is_named(numbered):
    port = free_port()
    numbered(1, 2, port)
    with pytest.raises(LaunchError, match=f"rank 1 got no answer from rank 0 at 127.0.0.1:{port} for 1 s"):
        join(2, 1)


def test_rank_0_does_not_wait_for_ever(numbered):
    numbered(0, 2, free_port())
    with pytest.raises(LaunchError, match="not all of the 2 processes came"):
        join(2, 1)


def test_a_machine_that_gives_the_others_an_address_of_no_use_learns_what_to_set(numbered, environment):
    def fail(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed with timed out connecting, remote=[127.0.0.1]:39809")

    environment.setattr(torch.distributed, "init_process_group", fail)
    numbered(1, 2, 1234)
    with pytest.raises(LaunchError, match=r"set GLOO_SOCKET_IFNAME on it .* \(here there are .*lo"):
        join(2, 1)


@pytest.mark.parametrize("names", ["nosuch", "lo,nosuch"])
def test_an_interface_that_is_not_here_is_named(numbered, environment, names):
    numbered(0, 2, free_port())
    environment.setenv("GLOO_SOCKET_IFNAME", names)
    with pytest.raises(LaunchError, match=r"^GLOO_SOCKET_IFNAME: .* interface nosuch; use .*lo.*, or unset it$"):
        join(2, 5)


def test_a_lacking_address_is_named(environment):
    environment.setenv("RANK", "0")
    environment.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="lacks MASTER_ADDR, MASTER_PORT: start"):
        join(2, 1)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK='' in the environment is not a whole number, 0 or more: torchrun and"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' in the environment is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment is not a whole number"),
        ({"RANK": "9", "WORLD_SIZE": "1"}, "RANK=9 and WORLD_SIZE=1 in the environment do not fit"),
        ({"SLURM_NTASKS": "", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a"}, "SLURM_NTASKS=''"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "x", "SLURM_STEP_NODELIST": "a"}, "SLURM_PROCID='x'"),
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a", "SLURM_JOB_ID": "mine"},
            "SLURM_JOB_ID='mine'",
        ),
    ],
)
def test_variables_that_are_no_numbers_are_named(environment, variables, told):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(LaunchError, match=re.escape(told)):
        launch(own_rank, [], 2)


@pytest.mark.parametrize("port", ["auto", "0", "65536", "-1"])
def test_a_port_that_is_none_is_named(numbered, environment, port):
    numbered(0, 2, 1234)
    environment.setenv("MASTER_PORT", port)
    with pytest.raises(LaunchError, match=f"MASTER_PORT='{port}' in the environment is no port: use a free one"):
        join(2, 1)


def test_a_name_that_stands_for_no_address_is_named(numbered, environment):
    numbered(1, 2, 1234)
    environment.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(
        LaunchError, match=r"MASTER_ADDR='no-such-host\.invalid' in the environment stands for no address"
    ):
        join(2, 0.1)


@pytest.mark.parametrize(("gpus", "works"), [(0, "use device=cpu$"), (1, "or workers= such that at most 1 processes")])
def test_too_few_gpus_are_refused_with_both_numbers(numbered, environment, gpus, works):
    numbered(0, 2, 1234)
    environment.setenv("LOCAL_RANK", "0")
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    environment.setattr(torch.cuda, "device_count", lambda: gpus)
    with (
        pytest.raises(LaunchError, match=f"2 processes on this machine, which has {gpus}: .*{works}"),
        process_group(torch.device("cuda"), 2, 1),
    ):
        pass


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
def test_the_kernel_breaks_a_connection_to_a_store_that_is_silent(environment):
    with closing(socket.create_server(("127.0.0.1", 0))) as store:
        environment.setenv("MASTER_PORT", str(store.getsockname()[1]))
        with closing(socket.create_connection(store.getsockname())) as connection:
            opened = len([*Path("/proc/self/fd").iterdir()])
            _limit_silence_of_the_store(20)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert len([*Path("/proc/self/fd").iterdir()]) == opened, "nothing stays open"


def test_threads_of_the_group_end_before_python_does(tmp_path, numbered):
    """In processes that an agent has started; a forked rank ends without all that Python does at its end."""
    numbered(0, 2, free_port())
    start = [sys.executable, "-c", AGENT, workers.__file__, "keep_the_group_in_a_cycle", str(tmp_path)]
    with subprocess.Popen(start, stdin=subprocess.PIPE):
        wait_until(lambda: len([each for each in tmp_path.glob("threads-*") if each.read_text()]) == 2)
    threads = [(tmp_path / f"threads-{rank}").read_text() for rank in range(2)]
    assert all(threads) and not any("gloo" in names for names in threads)


def test_a_process_alone_needs_no_group():
    with process_group(CPU, 1, 1):
        assert not torch.distributed.is_initialized()
        refuse_differing({"code": "a"})


def test_a_process_alone_in_a_group_asks_nobody(monkeypatch):
    """As under torchrun with one GPU: there is no gloo group, and NCCL moves no tensors of the CPU."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    refuse_differing({"code": "a"})


# The same everywhere


def test_equal_hashes_pass_and_differing_ones_are_named_by_all_ranks(tmp_path):
    hashes = [
        {"code": "a", "config": "b", "data": "c"},
        {"code": "x", "config": "b", "data": "c"},
        {"code": "x", "config": "b"},
    ]
    with pytest.raises(LaunchError, match=r"other than on rank 0 are: code on rank 1, 2; data on rank 2\. Give"):
        launch(workers.compare, [tmp_path, hashes], 3, imports=["torch"])
    messages = [(tmp_path / f"refused-{rank}").read_text() for rank in range(3)]
    assert len(set(messages)) == 1
