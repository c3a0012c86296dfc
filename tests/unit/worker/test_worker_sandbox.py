"""What a sandboxed process is refused by the kernel, and what it is not."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[3])


def run(code: str) -> subprocess.CompletedProcess[str]:
    begin = "from worker.sandbox import take_network; assert take_network()\n"
    return subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"])
def test_no_socket_can_be_opened(family: str) -> None:
    done = run(
        f"""
        import socket
        try:
            socket.socket(socket.{family}, socket.SOCK_RAW if "{family}" == "AF_PACKET" else socket.SOCK_STREAM)
        except PermissionError as error:
            print("refused", error.errno)
        """
    )
    assert done.stdout == "refused 13\n", done.stderr


def test_what_it_starts_is_refused_too_and_so_are_other_ways() -> None:
    done = run(
        """
        import ctypes, subprocess, sys
        code = "import urllib.request as u; u.urlopen('http://127.0.0.1:9')"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
        print("Permission denied" in said)
        libc = ctypes.CDLL(None, use_errno=True)
        for number in (425, 438):
            print(libc.syscall(number, 1, 0, 0), ctypes.get_errno())
        """
    )
    assert done.stdout == "True\n-1 13\n-1 13\n", done.stderr


def test_everything_else_goes_on() -> None:
    done = run(
        """
        import concurrent.futures, socket, tempfile, subprocess
        left, right = socket.socketpair()
        left.send(b"x"); print(right.recv(1))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            print(sum(pool.map(int, "123")))
        with tempfile.TemporaryFile() as file:
            file.write(b"y")
        print(subprocess.run(["true"]).returncode)
        """
    )
    assert done.stdout == "b'x'\n6\n0\n", done.stderr


HIDDEN = """
import ctypes, os, sys, time
from worker.sandbox import hide_memory
ready, tell = os.pipe()

def child(act):
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            os._exit(act())
        finally:
            os._exit(99)
    return pid

def victim():
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # changing users has hidden it already
    if sys.argv[1] == "hidden":
        hide_memory()
    os.write(tell, b"x")
    time.sleep(30)

def reader():
    try:
        open(f"/proc/{watched}/environ", "rb").close()
    except PermissionError:
        return 7
    return 0

watched = child(victim)
os.read(ready, 1)
print(os.waitstatus_to_exitcode(os.waitpid(child(reader), 0)[1]))
os.kill(watched, 9)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("hidden", "status"), [("open", "0"), ("hidden", "7")])
def test_a_hidden_process_cannot_be_read_by_its_own_user(hidden: str, status: str) -> None:
    """Both are nobody's; root's own readers are not kept out."""
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, hidden],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.strip() == status, done.stderr
