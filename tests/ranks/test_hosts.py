"""Two machines: two network namespaces that are joined by one virtual cable and share no loopback. torchrun starts one
rank in each. Skipped where namespaces are not allowed."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.test_torchrun import expected_tokens, found_in, start_script

HOSTS = ("10.173.61.1", "10.173.61.2")
PORT = 29517  # the namespaces are ours alone


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces, joined by a pair of virtual interfaces."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: there is no command ip (apt install iproute2)")
    tag = uuid.uuid4().hex[:6]
    names, cable = [f"nv{tag}a", f"nv{tag}b"], [f"nv{tag}x", f"nv{tag}y"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
            for name, end, address in zip(names, cable, HOSTS):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", cable[0]], check=False, capture_output=True)


def in_hexadecimal(address: str) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))


def test_one_rank_on_each_of_two_machines(qwen: Path, hosts: list[str]) -> None:
    shared = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", HOSTS[0], "--master-port", str(PORT)]
    agents = [
        start_script(qwen, "same", [*shared, "--node-rank", str(number)], prefix=["ip", "netns", "exec", host])
        for number, host in enumerate(hosts)
    ]
    try:
        printed = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    expected = expected_tokens(qwen)
    for number, text in enumerate(printed):
        found = found_in(text)
        assert len(found) == 1, text
        assert found[0]["rank"] == number
        assert found[0]["errors"] == []
        assert found[0]["tokens"] == expected
        # The interface that leads to the other machine, and no other. (The store is torchrun's.)
        assert in_hexadecimal(HOSTS[number]) in found[0]["listening"]
