"""A sandbox for programs that a model wrote. None of them is ever executed outside of it.

A program has no network, no socket and none of our environment. It sees no process but its own, and no file but
Python's library and a scratch folder of limited size. Processor time, time, memory, processes, files and output are
bounded. Each program has a fresh process that was never used before. When ``Sandbox.run`` returns, every process that
the program started is dead; all also die with this process. The faults of a program are its ``outcome``; SandboxError
is raised for failures of the sandbox itself.

shared.py         the sandboxes of this process, opened after attacks on them have failed: ``shared``, ``run_python``
box.py            ``Sandbox``: a jail for each program, started ahead
launch.py         the command lines that start a jail's process: bubblewrap, Landlock
gvisor.py         a jail by runsc
jail.py           the host's side of a jail: a trial's pipes, time and output
runner.py         the inner side: a child for each trial, under limits; kernel.py has its system calls
seccomp_rules.py  the system calls that a program may make
cgroup.py         a bound on all processes of a program together, on machines with cgroups
probe.py          attacks each mechanism to find one that holds programs on this machine; report.py is ``taut sandbox``
compiled.py       programs in C and C++
remote            runs programs at a service instead: Piston, E2B, Morph
code.py           the reward ``code``; python_tests.py and run_tests.py are for tests that are code themselves
python_tool.py    the tool ``python``

Without a mechanism that works, programs are refused; ``docs/environments.md`` says what holds where.
"""

from taut.commands.registry import HERE, Command

SANDBOX = Command(
    "[--json]",
    "test the sandbox mechanisms of this machine",
    "taut_tools.sandbox.report:run",
    "taut_tools.sandbox.report:SandboxReport",
    group=HERE,
)
