"""Why one process may not read another's memory. Pure."""

from __future__ import annotations

from torch_nixl.cli.doctor.report import CmaTrial, Host


def explain_denial(cma: CmaTrial, host: Host) -> tuple[str, str]:
    """Return the likeliest cause in a few words, and the mend.

    Args:
        cma: A trial that failed.
        host: From the operating system.
    """
    scope = host.yama_ptrace_scope
    if cma.error == "ENOSYS":
        return (
            "the kernel or the sandbox has no such call",
            "use a kernel with CONFIG_CROSS_MEMORY_ATTACH; some sandboxes, like gVisor, lack it",
        )
    if cma.own_error is not None:
        # To read its own memory a process needs no permission, only the call.
        return "a seccomp filter forbids the call, even for a process's own memory", _ADD_PTRACE
    if scope is not None and scope >= 2 and not host.cap_sys_ptrace:
        again = " (3 lasts until the next boot)" if scope == 3 else ""
        return (
            f"Yama's ptrace_scope is {scope}",
            f"as root: sysctl kernel.yama.ptrace_scope=1, now {scope}{again}",
        )
    if cma.dumpable is False:
        return (
            "the kernel protects this process: it changed its user, or its program is privileged",
            _START_PLAINLY,
        )
    if host.confined_by is not None:
        return (
            f"this process is confined by {host.confined_by}",
            f"allow ptrace in that profile, or run without it; if it isn't that: {_OTHERWISE}",
        )
    if host.seccomp_mode == 2:
        return "a seccomp filter is in force", _ADD_PTRACE
    if host.in_user_namespace:
        return "this process is in a user namespace of its own", _OTHERWISE
    return "the two processes differ in user or privileges", _OTHERWISE


_ADD_PTRACE = (
    "in a container: start it with --cap-add=SYS_PTRACE, which also lets seccomp pass it, or give "
    "it a seccomp profile that allows process_vm_readv and process_vm_writev"
)
_START_PLAINLY = (
    "start Python as the user it is to run as, from a program file that this user may read and "
    "that has no file capabilities (`getcap`), or give it CAP_SYS_PTRACE"
)
_OTHERWISE = (
    "run both processes as the same user, in one user namespace (one container), without setuid "
    "programs in between, or give them CAP_SYS_PTRACE"
)
