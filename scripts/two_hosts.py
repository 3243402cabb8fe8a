"""Two or more hosts on one machine: Linux namespaces with names, addresses and processes of their own, and cables.

    with two_hosts() as (a, b):
        subprocess.run(a.command("ping", "-c1", b.name))

`star` joins any number of them by a switch.

It needs root, util-linux (`unshare`, `nsenter`) and iproute2 (`ip`, `tc`). Both hosts see all files.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

NAMES = ("host-a", "host-b")
INTERFACE = "eth0"


class NoHostsError(RuntimeError):
    """This machine cannot make hosts; the message says what it lacks."""


@dataclass(frozen=True)
class Host:
    """Namespaces for network, name, mounts and processes, which end with process `pid`."""

    name: str
    address: str
    pid: int

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` on this host, in the root folder."""
        processes = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", processes, "--", *arguments]


def vanish(hosts: Sequence[Host], number: int) -> None:
    """End one of two hosts as a loss of power does: the other one gets no answer any more, and no word of it."""
    gone, other = hosts[number], hosts[1 - number]
    hardware_address = re.findall(r"link/ether (\S+)", _do(*gone.command("ip", "link", "show", INTERFACE)))[0]
    neighbour = (gone.address, "lladdr", hardware_address, "dev", INTERFACE, "nud", "permanent")
    _do(*other.command("ip", "neighbour", "replace", *neighbour))  # or the kernel would soon say that nobody is there
    # Before its processes end: the kernel would tell the other side of their connections.
    _do(*gone.command("ip", "address", "flush", "dev", INTERFACE))
    (first,) = Path(f"/proc/{gone.pid}/task/{gone.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGKILL)  # of its namespace: the kernel ends the others


@contextmanager
def two_hosts(rate_mbit: int | None = None) -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other by name; all that runs on them ends with the body, or with this process.

    Args:
        rate_mbit: What the cable carries in each direction, in Mbit/s; all that the machine can, if None.

    Raises:
        NoHostsError: This machine cannot make them.
    """
    with _hosts(NAMES) as (a, b):
        _cable(a, INTERFACE, b, INTERFACE, rate_mbit)
        for host in (a, b):
            _do(*host.command("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE))
        yield a, b


@contextmanager
def star(number: int, rate_mbit: int) -> Iterator[tuple[Host, ...]]:
    """Make so many hosts, each with a cable to one switch that carries `rate_mbit` Mbit/s in each direction.

    Raises:
        NoHostsError: This machine cannot make them.
    """
    with _hosts([*(f"host-{place}" for place in range(number)), "switch"]) as (*hosts, switch):
        _do(*switch.command("ip", "link", "add", "bridge", "type", "bridge"))
        _do(*switch.command("ip", "link", "set", "bridge", "up"))
        for place, host in enumerate(hosts):
            _cable(host, INTERFACE, switch, f"port{place}", rate_mbit)
            _do(*switch.command("ip", "link", "set", f"port{place}", "master", "bridge"))
            _do(*host.command("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE))
        yield tuple(hosts)


@contextmanager
def _hosts(names: Sequence[str]) -> Iterator[list[Host]]:
    """Make hosts that know each other's addresses, and have no cables yet."""
    addresses = {name: f"10.77.0.{place}" for place, name in enumerate(names, start=1)}
    with ExitStack() as stack:
        hosts_file = Path(stack.enter_context(TemporaryDirectory(prefix="two-hosts-"))) / "hosts"
        hosts_file.write_text("".join(f"{ip} {name}\n" for name, ip in {"localhost": "127.0.0.1", **addresses}.items()))
        yield [stack.enter_context(_host(name, address, hosts_file)) for name, address in addresses.items()]


def _cable(one: Host, interface: str, other: Host, its_interface: str, rate_mbit: int | None) -> None:
    """Join two hosts by a cable; both of its ends are up, and send no faster than its rate."""
    _do("ip", "link", "add", interface, "netns", str(one.pid), "type", "veth",
        "peer", "name", its_interface, "netns", str(other.pid))  # fmt: skip
    for host, end in ((one, interface), (other, its_interface)):
        for each in ("lo", end):
            _do(*host.command("ip", "link", "set", each, "up"))
        if rate_mbit is not None:
            burst = max(256, 8 * rate_mbit)  # in kbit: 8 ms, as the kernel's clock may tick every 4 ms only
            limit = f"tbf rate {rate_mbit}mbit burst {burst}kbit latency 50ms".split()
            _do(*host.command("tc", "qdisc", "add", "dev", end, "root", *limit))


@contextmanager
def _host(name: str, address: str, hosts_file: Path) -> Iterator[Host]:
    """Make a host: its first process reads from a pipe, and the kernel ends all others with it."""
    prepare = f"hostname {name} && mount --bind {shlex.quote(str(hosts_file))} /etc/hosts && echo ready && exec cat"
    namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(["unshare", *namespaces, "sh", "-c", prepare], text=True, **pipes)
    except FileNotFoundError as error:
        raise NoHostsError("`unshare` of util-linux is not installed") from error
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise NoHostsError(f"no namespaces can be made here: {process.communicate()[1].strip()}")
        yield Host(name, address, process.pid)
    finally:
        try:
            process.communicate(timeout=5)  # closes the pipe
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _do(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NoHostsError(f"`{command[0]}` is not installed (apt-get install iproute2)") from error
    if done.returncode:
        raise NoHostsError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
