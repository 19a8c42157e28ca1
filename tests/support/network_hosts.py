"""Two hosts as network namespaces, with a cable between them that may be pulled, and with ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.launching.ssh import SSH

INTERFACE: Final = "cable"
_SERVER: Final = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
AuthenticationMethods publickey
StrictModes no
"""
# The server runs in the host's network and talks over its standard streams: it needs no port.
_CLIENT: Final = """\
ProxyCommand ip netns exec %h {server} -i -f {folder}/server
IdentityFile {folder}/key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile {folder}/known
LogLevel ERROR
"""


@dataclass(frozen=True)
class Hosts:
    """The namespaces' names, and the addresses of their ends of the cable."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    @property
    def words(self) -> str:
        """The hosts as `submit ssh --hosts` takes them."""
        return ",".join(map("=".join, zip(self.names, self.addresses, strict=True)))

    def shell(self, folder: Path) -> str:
        """Return `submit ssh --shell` for these hosts: ssh, or without its programs `ip netns`."""
        server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if server is None or shutil.which("ssh") is None:
            return "ip netns exec {host}"
        folder.mkdir()
        for key in ("host_key", "key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(make, check=True, timeout=30)
        Path("/run/sshd").mkdir(exist_ok=True)  # where no init system has made it
        (folder / "server").write_text(_SERVER.format(folder=folder))
        (folder / "client").write_text(_CLIENT.format(folder=folder, server=server))
        return SSH.replace("ssh ", f"ssh -F {shlex.quote(str(folder / 'client'))} ", 1)

    def pull(self) -> None:
        """Pull the cable."""
        _ip("-n", self.names[0], "link", "set", INTERFACE, "down")

    def plug(self) -> None:
        """Put the cable back."""
        _ip("-n", self.names[0], "link", "set", INTERFACE, "up")

    def received_bytes(self) -> list[int]:
        """Return the bytes that each end has received."""
        file = f"/sys/class/net/{INTERFACE}/statistics/rx_bytes"
        return [int(_ip("netns", "exec", name, "cat", file)) for name in self.names]


def refusal() -> str | None:
    """Return the reason why this machine cannot have such hosts."""
    name = f"try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs iproute2 and the right to make network namespaces: {error}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make the hosts; whatever happens, they are gone at the end."""
    names = (f"a-{os.getpid()}", f"b-{os.getpid()}")
    hosts = Hosts(names, ("10.213.77.1", "10.213.77.2"))
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        peer = ["peer", "name", INTERFACE, "netns", names[1]]
        _ip("-n", names[0], "link", "add", INTERFACE, "type", "veth", *peer)
        for name, address in zip(names, hosts.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield hosts


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout
