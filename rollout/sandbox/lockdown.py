"""What a process gives up before it runs untrusted code (Linux on x86-64, no root needed). Standard library only.

`enter_namespaces` leaves users, files, network, processes and IPC of the host; under a `SystemCallFilter` only system
calls work that compute, and in private namespaces those on files. Invariant: no allowed system call starts a process,
opens a socket, sends a signal, reads another process, or undoes a limit.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

_libc = ctypes.CDLL(None, use_errno=True)
_fork = ctypes.PyDLL(None, use_errno=True).fork

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET, _CLONE_THREAD = 0x10000000, 0x20000000, 0x40000000, 0x10000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2
_KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of statvfs and of mount: a bind mount must keep those of its source."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER, _PIVOT_ROOT = 2, 155

_ARCH_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
"""Offsets in seccomp's data."""
_ALLOW, _FAIL = 0x7FFF0000, 0x50000

# Numbers of system calls: asm/unistd_64.h of Linux.
_COMPUTING = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
    "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18, "readv": 19,
    "writev": 20, "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35,
    "getpid": 39, "exit": 60, "uname": 63, "gettimeofday": 96, "getrusage": 98, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "futex": 202,
    "sched_getaffinity": 204, "set_tid_address": 218, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "set_robust_list": 273, "dup3": 292, "getrandom": 318, "rseq": 334,
}  # fmt: skip
_ON_FILES = {
    "open": 2, "stat": 4, "lstat": 6, "access": 21, "flock": 73, "fsync": 74, "fdatasync": 75, "truncate": 76,
    "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85,
    "unlink": 87, "readlink": 89, "statfs": 137, "fstatfs": 138, "getdents64": 217, "openat": 257, "mkdirat": 258,
    "newfstatat": 262, "unlinkat": 263, "renameat": 264, "readlinkat": 267, "faccessat": 269, "utimensat": 280,
    "renameat2": 316, "statx": 332, "faccessat2": 439,
}  # fmt: skip
_CLONE, _CLONE3, _FCNTL = 56, 435, 72
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""Duplicate, flags; not those that make the kernel send signals."""


class LockdownError(OSError):
    """The host does not allow what the sandbox needs."""


def check_platform() -> None:
    """Raise LockdownError where this process is not one of Linux on x86-64."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 2**32:
        raise LockdownError(f"seccomp needs Linux on x86-64, this is {sys.platform} on {platform.machine()}")


def enter_namespaces(folders: list[str], *, root: str) -> None:
    """Move this process into namespaces of its own, whose only files are `folders`, read-only, and go on as process 1
    of them in a child: the caller waits for it and exits as it does. `root`: an existing folder to mount on. Raises
    LockdownError."""
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    _check(_libc.unshare(flags), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        _write(f"/proc/self/{name}", text)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for folder in folders:
        target = root + folder
        os.makedirs(target)
        _mount(folder, target, None, _MS_BIND | _MS_REC)
        found = os.statvfs(folder).f_flag
        kept = sum(flag for bit, flag in _KEPT_FLAGS.items() if found & bit)
        _mount("none", target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | kept)
    os.makedirs(f"{root}/work")
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")
    _mount("none", "/", None, _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    if child := fork():
        os.closerange(3, 64)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    die_with_parent()


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def private_work_folder(size_bytes: int) -> None:
    """Change to /work, an empty file system of this process alone, of at most `size_bytes`. In private namespaces."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount("tmpfs", "/work", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size_bytes},nr_inodes=1024")
    os.chdir("/work")


def fork() -> int:
    """Fork this process, which has one thread, and return as os.fork() does. Python's handlers of a fork do not run:
    they serve processes with threads, and take a sixth of a call. Raises LockdownError."""
    child: int = _fork()
    _check(child, "fork")
    return child


def limit(**most: int) -> None:
    """Limit resources of this process for good, to at most what is in force: AS=bytes, CPU=seconds and so on, by the
    names of `resource.RLIMIT_*`."""
    for name, value in most.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


class SystemCallFilter:
    """Lets every system call fail but those that compute and, with `files`, those on files."""

    def __init__(self, *, files: bool) -> None:
        program = _computing_only(files=files)
        self._code = ctypes.create_string_buffer(program, len(program))
        self._program = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(self._code))

    def enforce(self) -> None:
        """Put it in force in this process for good. Raises LockdownError."""
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._program, 0, 0), "prctl(PR_SET_SECCOMP)")


def _computing_only(*, files: bool) -> bytes:
    """Return the program of a SystemCallFilter, in classic BPF."""
    fail = _step(_RETURN, _FAIL | errno.EPERM)
    allow = _step(_RETURN, _ALLOW)
    allowed = [*_COMPUTING.values(), *(_ON_FILES.values() if files else ())]
    program = [
        _step(_LOAD, _ARCH), _step(_JUMP_EQUAL, _ARCH_X86_64, 1, 0), fail,
        _step(_LOAD, _NUMBER), _step(_JUMP_AT_LEAST, _X32, 0, 1), fail,
    ]  # fmt: skip
    for number in allowed:
        program += [_step(_JUMP_EQUAL, number, 0, 1), allow]
    program += [_step(_JUMP_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _FAIL | errno.ENOSYS)]  # libc takes clone then
    program += [_step(_JUMP_EQUAL, _CLONE, 0, 4), _step(_LOAD, _ARGUMENT_0), _step(_JUMP_SET, _CLONE_THREAD, 0, 1)]
    program += [allow, fail]
    program += [_step(_JUMP_EQUAL, _FCNTL, 0, 1 + 2 * len(_FCNTL_COMMANDS)), _step(_LOAD, _ARGUMENT_1)]
    for command in _FCNTL_COMMANDS:
        program += [_step(_JUMP_EQUAL, command, 0, 1), allow]
    return b"".join([*program, fail])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None)
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), data.encode()), f"mount on {target}")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise LockdownError(error.errno, f"{path}: {error.strerror}") from error


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise LockdownError(number, f"{what}: {os.strerror(number)}")
