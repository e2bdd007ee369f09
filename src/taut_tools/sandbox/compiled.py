"""Programs in C and C++: compiled in one sandbox, run in another. No compiler or loader outside a sandbox touches the
source or the program.

    compiler = find_compiler("cpp", Compilation())
    program = compile_source(compiler, source)     # a Python program for the sandbox, or the reason why there is none
    shared().run(program, [Trial(stdin="1 2")], Limits())

The compiler runs in a sandbox as Python programs do, but may also read its own files: programs, headers and libraries.
It has the same system calls, and no other file, socket or process. The compiled program comes back as bytes
and goes into a sandbox without a compiler: there each trial writes the bytes into its scratch folder and executes them.
So nothing of a compilation is left where the program runs, and no test can change the program of another.

The mechanism has to let programs start programs and write files, which Landlock does not.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from taut.config import configclass
from taut.errors import SandboxError
from taut_tools.sandbox.box import Sandbox
from taut_tools.sandbox.limits import Limits, Trial

CompiledLanguage = Literal["c", "cpp"]
CompilerName = Literal["gcc", "clang"]

COMMANDS: dict[CompilerName, dict[CompiledLanguage, str]] = {
    "gcc": {"c": "gcc", "cpp": "g++"},
    "clang": {"c": "clang", "cpp": "clang++"},
}
_PROGRAMS = ("cc1", "cc1plus", "collect2", "as", "ld")
"""Programs that a compiler starts; clang has only the last."""
_LIBRARIES = ("crt1.o", "libgcc.a", "libc.so", "libstdc++.so")
_SHOWN = 200

_COMPILE = """
import base64, os, subprocess, sys
with open({source!r}, "w") as file:
    file.write(sys.stdin.read())
environment = {{**os.environ, "PATH": {path!r}}}
code = subprocess.call({line!r}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
if code:
    sys.exit(1)
with open("program", "rb") as file:
    print(base64.b64encode(file.read()).decode())
"""
_RUN = """
import base64, contextlib, os, signal
with contextlib.suppress(FileNotFoundError):
    os.unlink("program")
with open(os.open("program", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
    file.write(base64.b64decode({program!r}))
os.close(3)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
    signal.signal(number, signal.SIG_DFL)
os.execv("program", ["program"])
"""


@configclass
class Compilation:
    """The compilation of programs in C and C++."""

    compiler: CompilerName | None = None
    """Compiler: gcc (gcc and g++) or clang (clang and clang++); default: the first that is installed."""
    c_flags: tuple[str, ...] = ("-std=gnu17", "-O2")
    """Flags of the compiler for C."""
    cpp_flags: tuple[str, ...] = ("-std=gnu++17", "-O2")
    """Flags of the compiler for C++."""
    limits: Limits = Limits(
        cpu_seconds=20,
        wall_seconds=30.0,
        memory_mb=2048,
        open_files=256,
        scratch_mb=128,
        output_kb=16384,
    )
    """Limits on a compilation, whose output is the program and messages."""


class Compiler(NamedTuple):
    """A compiler of this machine."""

    name: str
    """Command and version."""
    line: tuple[str, ...]
    """Command line that compiles ``source`` to ``program`` in the working directory."""
    source: str
    path: str
    """Folders of the programs that it starts."""
    files: tuple[str, ...]
    """Files and folders that it reads."""


class Uncompiled(NamedTuple):
    """The reason why a source does not compile."""

    reason: str


def find_compiler(language: CompiledLanguage, compilation: Compilation) -> Compiler:
    """Find the compiler of a language. Raises SandboxError where there is none on this machine."""
    names = list(COMMANDS) if compilation.compiler is None else [compilation.compiler]
    commands = [COMMANDS[name][language] for name in names]
    found = next(filter(None, map(shutil.which, commands)), None)
    if found is None:
        raise SandboxError(
            f"found no compiler for {language} on this machine ({', '.join(commands)}); expected one of them; on "
            f"Debian run: apt install g++, or take {language} out of languages"
        )
    source = f"program.{language}"
    flags = compilation.c_flags if language == "c" else compilation.cpp_flags
    name, path, files = _examine(found, language)
    line = (found, *flags, source, "-o", "program", *(["-lm"] if language == "c" else []))
    return Compiler(name, line, source, path, files)


def compile_source(
    compiler: Compiler, sandbox: Sandbox, source: str, limits: Limits
) -> str | Uncompiled:
    """Compile a source to a Python program for ``Sandbox.run``, which executes it with its own standard input and
    output. Programs in ``sandbox`` may read the compiler's files.
    """
    script = _COMPILE.format(source=compiler.source, path=compiler.path, line=list(compiler.line))
    (ran,) = sandbox.run(script, [Trial(stdin=source)], limits)
    if ran.outcome != "ok":
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[-1] if lines else "")
        return Uncompiled(f"it does not compile: {first.strip()[:_SHOWN] or ran.outcome}")
    return _RUN.format(program=ran.stdout.strip())


PROOFS: dict[CompiledLanguage, str] = {
    "c": '#include <stdio.h>\nint main(void) { int a; scanf("%d", &a); printf("%d\\n", a * 2); }\n',
    "cpp": "#include <iostream>\nint main() { int a; std::cin >> a; std::cout << a * 2 << std::endl; }\n",
}


def require_compiles(
    language: CompiledLanguage, compiler: Compiler, box: Sandbox, run_box: Sandbox, limits: Limits
) -> None:
    """Raise SandboxError unless a known program compiles in ``box`` and runs in ``run_box``."""
    program = compile_source(compiler, box, PROOFS[language], limits)
    if isinstance(program, Uncompiled):
        reason = program.reason
    else:
        (ran,) = run_box.run(program, [Trial(stdin="21")])
        if ran.stdout == "42\n":
            return
        reason = f"it ended with {ran.outcome}: {ran.stderr.strip()[-_SHOWN:]}"
    raise SandboxError(
        f"{compiler.name} made nothing of a known program in the sandbox ({reason}); expected one that runs; correct "
        f"compile.{language}_flags, or take {language} out of languages"
    )


@functools.cache
def _examine(command: str, language: CompiledLanguage) -> tuple[str, str, tuple[str, ...]]:
    """Ask a compiler for its version, the folders of its programs, and all files that it reads."""
    kind = "c++" if language == "cpp" else "c"
    version = _said(command, ["--version"]).partition("\n")[0]
    number = re.search(r"\d+\.\d+(\.\d+)?", version)
    programs = [_said(command, [f"-print-prog-name={name}"]).strip() for name in _PROGRAMS]
    paths = [command, *filter(None, map(shutil.which, programs))]
    headers = _said(command, ["-E", "-v", "-x", kind, "/dev/null"]).partition("search starts here:")
    folders = [line.strip() for line in headers[2].splitlines() if line.startswith(" ")]
    libraries = [_said(command, [f"-print-file-name={name}"]).strip() for name in _LIBRARIES]
    folders += [str(Path(library).parent) for library in libraries if os.path.isabs(library)]  # noqa: PTH117
    files = {*paths, *(os.path.realpath(folder) for folder in folders if Path(folder).is_dir())}
    return (
        f"{Path(command).name} {number[0] if number else version}",
        ":".join(dict.fromkeys(str(Path(path).parent) for path in paths)),
        tuple(sorted(file for file in files if files.isdisjoint(map(str, Path(file).parents)))),
    )


def _said(command: str, arguments: Sequence[str]) -> str:
    """Run a compiler that prints about itself; its output."""
    line = [command, *arguments]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        line, capture_output=True, text=True, env=environment, check=False, timeout=60
    )
    return done.stdout + done.stderr
