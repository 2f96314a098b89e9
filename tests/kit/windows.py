"""Hides the POSIX modules and attributes that Windows lacks, and Ray, when imported.

``python -m pytest -p windows -n 0 tests/common`` runs tests without them. PyTorch and
Flower, which are imported first, have their own code for each system.
"""

import os
import signal
import sys

import filelock  # noqa: F401
import torch  # noqa: F401

MODULES = "fcntl grp pwd ray resource termios tty pty syslog readline"
# filelock needs `O_NONBLOCK`; pytest needs `getuid` and `O_CLOEXEC`, which
# `test_platforms` hides as well.
OS = """O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_SYNC WNOHANG chown chroot
fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp
getpriority getsid initgroups killpg lchown lockf mkfifo mknod nice openpty
posix_fadvise posix_fallocate pread preadv pwrite pwritev readv sched_getaffinity
sched_setaffinity sched_yield seteuid setgid setpgid setsid setuid statvfs sync
sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid writev"""
SIGNALS = "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2"

for name in MODULES.split():
    sys.modules[name] = None  # type: ignore[assignment]
for name in OS.split():
    delattr(os, name)
for name in SIGNALS.split():
    delattr(signal, name)
