"""Takes from a process what it will not need: the network, a look into other processes, a look into itself.

By the kernel's seccomp filter, which needs no privilege and which every descendant inherits. Must not import anything
but the standard library: it runs before a converting process loads what reads hostile files.

    python -m worker.sandbox        exit status 0 when a filter can be set here, and holds
"""

import ctypes
import errno
import platform
import socket
import struct
import sys

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 4, 38, 22
_FILTER_MODE = 2
_LOAD, _EQUALS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # in struct seccomp_data
_X32 = 0x40000000  # a second numbering of x86_64's calls

# Per machine: its audit number, then socket, ptrace, process_vm_readv, process_vm_writev.
_MACHINES = {"x86_64": (0xC000003E, (41, 101, 310, 311)), "aarch64": (0xC00000B7, (198, 117, 270, 271))}
_ALIKE = (425, 438)  # io_uring_setup, which could open sockets too, and pidfd_getfd, which takes those of others

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def take_network() -> bool:
    """Refuse this thread, and all that it will start, every new socket; False where the kernel has no such filter.

    Open descriptors stay usable, socket pairs too. Cannot be undone. To be called before there are other threads.
    """
    filtered = _filter()
    if filtered is None or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    program = _Program(len(filtered) // 8, filtered)
    return bool(_libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0) == 0)


def hide_memory() -> None:
    """Keep other processes of this user, save root's, from reading this one's environment and memory; forks too."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _filter() -> bytes | None:
    known = _MACHINES.get(platform.machine())
    if known is None:
        return None
    architecture, own = known
    refused = (*own, *_ALIKE)
    last = len(refused) + 1  # instructions between a refused number's test and the refusal, for the first of them
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUALS, 0, last + 2, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, last, 0, _X32),
        *((_EQUALS, len(refused) - place, 0, number) for place, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _main() -> int:
    if not take_network():
        return 1
    try:
        socket.socket().close()
    except PermissionError:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(_main())
