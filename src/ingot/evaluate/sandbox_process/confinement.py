"""Limits that a process sets itself for good: resources, system calls, and in weak mode files and modules."""

import os
import sys
from typing import Any

LIMITS = {"FSIZE": 16 << 20, "CORE": 0, "NOFILE": 64}
"""Resource limits beside CPU time and memory: bytes of a file, bytes of a core dump, open files."""

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> its number in seccomp filters."""
CLONE, CLONE3 = (56, 220), (435, 435)
DENIED = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "socket": (41, 198),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""Refused system calls -> their numbers in the order of `MACHINES`: those that start processes, reach or trace others,
raise limits, open connections, change mounts, or open parts of the kernel that no test needs."""


def deny_system_calls() -> None:
    """Install a seccomp filter (seccomp(2)), which the kernel keeps until the process ends.

    Raises:
        OSError: the kernel or the machine has none.
    """
    import ctypes
    import struct

    name = os.uname().machine
    if sys.platform != "linux" or name not in MACHINES:
        raise OSError(f"no filter of system calls for {sys.platform} on {name}")
    machine = [*MACHINES].index(name)
    load, equal, greater, bits, leave = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: load, jump if =, if >=, if any bit, return
    allow, kill, refuse = (
        0x7FFF0000,
        0x80000000,
        0x00050000,
    )  # what seccomp returns; the lower half of `refuse` is errno
    eperm, enosys, thread = 1, 38, 0x10000
    steps = [(load, 0, 0, 4), (equal, 1, 0, MACHINES[name]), (leave, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(greater, 0, 1, 0x40000000), (leave, 0, 0, refuse | eperm)]  # the x32 numbers of x86_64
    for number in filter(None, (numbers[machine] for numbers in DENIED.values())):
        steps += [(equal, 0, 1, number), (leave, 0, 0, refuse | eperm)]
    steps += [(equal, 0, 1, CLONE3[machine]), (leave, 0, 0, refuse | enosys)]  # libc then uses clone
    steps += [(equal, 0, 3, CLONE[machine]), (load, 0, 0, 16), (bits, 1, 0, thread), (leave, 0, 0, refuse | eperm)]
    steps += [(leave, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((38, 1, 0, 0, 0), (22, 2, ctypes.addressof(program), 0, 0)):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if libc.prctl(call[0], *map(ctypes.c_ulong, call[1:])):
            raise OSError(ctypes.get_errno(), "no system call filter")


REFUSED_MODULES = (
    "_ctypes",
    "_dbm",
    "_gdbm",
    "_interpreters",
    "_posixshmem",
    "_posixsubprocess",
    "_sqlite3",
    "_ssl",
    "_testcapi",
    "_testinternalcapi",
    "_tkinter",
    "_xxsubinterpreters",
    "cffi",
    "ctypes",
    "gc",
    "grp",
    "mmap",
    "multiprocessing",
    "pwd",
    "readline",
    "spwd",
)
REFUSED_EVENTS = (
    "code.__new__",
    "ctypes.",
    "fcntl.",
    "gc.",
    "mmap.",
    "os.chdir",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.getxattr",
    "os.kill",
    "os.link",
    "os.listxattr",
    "os.mkdir",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.removexattr",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.utime",
    "pty.",
    "resource.",
    "shutil.",
    "signal.",
    "socket.",
    "subprocess.",
    "sys._current_exceptions",
    "sys._current_frames",
    "sys.setprofile",
    "sys.settrace",
    "syslog.",
    "tempfile.",
    "webbrowser.",
)
"""What weak mode refuses: modules that reach memory, processes, or files without an event, and beginnings of events."""


def refuse_events() -> None:
    """The guard of programs in weak mode: an audit hook (PEP 578), which cannot be removed.

    It reads only its closure, so a program that replaces builtins does not change it, and it refuses access to frames,
    through which closures can be changed.
    """
    library = os.path.join(os.path.realpath(os.path.dirname(os.__file__)), "")
    changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    text, kind, modules, events = str, type, frozenset(REFUSED_MODULES), REFUSED_EVENTS
    refuse, no_module, no_frame = PermissionError, ImportError, ValueError

    def guard(event: str, arguments: Any) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path, flags = arguments[0], arguments[2] if event == "open" else 0
            if kind(path) is not text or (flags or 0) & changing:
                raise refuse("files are out of reach")
            if not (path + "/").startswith(library) or ".." in path:
                raise refuse("files are out of reach")
        elif event == "import" and not modules.isdisjoint(arguments[0].split(".")):
            raise no_module(arguments[0] + " is out of reach")
        elif event == "object.__getattr__" and arguments[1].endswith("_frame"):
            raise refuse("frames are out of reach")
        elif event == "sys._getframe" or event == "sys._getframemodulename":
            raise no_frame("frames are out of reach")  # the library expects a ValueError here
        elif event.startswith(events):
            raise refuse(event + " is out of reach")

    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]
    sys.addaudithook(guard)


def confine(seconds: int, memory: int, weak: bool) -> None:
    """Limit this process for good.

    Raises:
        OSError: there is no filter of system calls; `weak` goes on without.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for name, limit in {**LIMITS, "AS": memory}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    try:
        deny_system_calls()
    except (OSError, ImportError):
        if not weak:
            raise
