"""The table of attacks in C++: sources that attack through the compiler, and compiled programs that attack by
themselves. ``test_sources`` compiles every row as the reward ``code`` does, runs it, and looks at the host.

A program reports as those of ``programs.py``: "refused" or "through" with the name of an attempt, "end" at its end.
``TEXT`` before every program has ``attempt(name, is_through)`` and the system calls by number, so that nothing of the C
library is between the program and the kernel. ``@NAME@`` becomes what the host planted under that name.

``as_c`` makes a C program of a program in Python: it becomes Python in its place, with the same arguments as the
guest's. So the attacks of ``programs.py`` are attacks of a compiled program, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from taut_tools.sandbox.limits import Limits


class Ends(Enum):
    """What must become of a source. In every row the host is unchanged afterwards and the next program is served."""

    IN_NO_PROGRAM = "it does not compile, and the reason holds nothing of the host's"
    IN_A_REFUSAL = "it compiles, and every attempt of the program is refused"
    AT_A_LIMIT = "it compiles, and the program ends at its limit, or by its own fault"
    IN_A_DEAD_PROGRAM = (
        "it compiles, and none of the program's processes is alive when its run returns"
    )


LIMITS = Limits(memory_mb=256, processes=8, scratch_mb=8, wall_seconds=5.0, cpu_seconds=1)


@dataclass(frozen=True)
class Source:
    """One row of the table."""

    name: str
    ends: Ends
    text: str
    outcomes: frozenset[str] = frozenset({"ok"})
    limits: Limits = LIMITS

    def source(self, given: Mapping[str, Any]) -> str:
        """The whole source. ``given``: what the host planted."""
        text = self.text if self.ends is Ends.IN_NO_PROGRAM else TEXT + self.text
        for name, value in given.items():
            text = text.replace(f"@{name}@", str(value))
        return text


TEXT = r"""
#include <arpa/inet.h>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

static void attempt(const std::string& name, bool is_through) {
  printf("%s\t%s\t%d\n", is_through ? "through" : "refused", name.c_str(), errno);
  fflush(stdout);
}
static long kernel(long n, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0, long f = 0) {
  register long r10 asm("r10") = d, r8 asm("r8") = e, r9 asm("r9") = f;
  long result;
  asm volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  if (result < 0 && result > -4096) { errno = -result; return -1; }
  return result;
}
static void door(const char* name, long n, long a = 0, long b = 0, long c = 0, long d = 0) {
  long result = kernel(n, a, b, c, d);
  attempt(name, !(result == -1 && (errno == EPERM || errno == ENOSYS)));
}
static bool can_open(const char* path, int flags) {
  int file = open(path, flags, 0666);
  if (file >= 0) close(file);
  return file >= 0;
}
static int begin = (prctl(PR_SET_NAME, "@mark@", 0, 0, 0), 0);
"""

SOURCES: list[Source] = []


def add(name: str, ends: Ends, text: str, outcomes: str = "ok", **more: Any) -> None:
    SOURCES.append(Source(name, ends, text, frozenset(outcomes.split()), **more))


# -- through the compiler ----------------------------------------------------------------------------------------------

for path in (
    "@secret@",
    "@link@",
    "/etc/passwd",
    "/proc/self/environ",
    "/proc/1/cmdline",
    "@table@",
    "@home@/.netrc",
):
    add(f"a header that is {path}", Ends.IN_NO_PROGRAM, f'#include "{path}"\nint main() {{}}\n')
    add(
        f"{path} in the assembler's data",
        Ends.IN_NO_PROGRAM,
        f'asm(".incbin \\"{path}\\"");\nint main() {{}}\n',
    )
add(
    "a folder above as a header's",
    Ends.IN_NO_PROGRAM,
    '#include "../../../../../..@secret@"\nint main() {}\n',
)
add("a device as a header", Ends.IN_NO_PROGRAM, '#include "/dev/zero"\nint main() {}\n')
add(
    "a device in the assembler's data",
    Ends.IN_NO_PROGRAM,
    'asm(".incbin \\"/dev/zero\\"");\nint main() {}\n',
)
add("itself as a header", Ends.IN_NO_PROGRAM, "#include __FILE__\nint main() {}\n")
add(
    "itself as a header, twice at each depth",
    Ends.IN_NO_PROGRAM,
    "#if __INCLUDE_LEVEL__ < 190\n#include __FILE__\n#include __FILE__\n#endif\nint main() {}\n",
)
add(
    "templates without end",
    Ends.IN_NO_PROGRAM,
    "template <int n> struct A { static const long v = A<n - 1>::v + A<n - 2>::v; A<n + 1>* p; };\n"
    "template <class T, int n> struct B { typedef typename B<B<T, n>, n + 1>::type type; };\n"
    "int main() { return A<800>::v + sizeof(B<int, 0>::type); }\n",
)
add(
    "a loop that the compiler runs",
    Ends.IN_NO_PROGRAM,
    "constexpr long f(long n) { return n < 2 ? 1 : f(n - 1) + f(n - 2); }\n"
    "constexpr long g(long n) { long s = 0; for (long i = 0; i < 200000; ++i) s += f(20 + n % 3 + i % 2); return s; }\n"
    "static_assert(g(1) + g(2) + g(3) == 5);\nint main() {}\n",
)
_DOUBLED = "".join(f"#define M{n + 1} M{n} M{n}\n" for n in range(34))
add(
    "macros that double",
    Ends.IN_NO_PROGRAM,
    f"#define M0 x +\n{_DOUBLED}int x; int main() {{ return M34 0; }}\n",
)
add(
    "an array of data larger than a file",
    Ends.IN_NO_PROGRAM,
    "char a[1L << 31] = {1};\nint main() {}\n",
)
add(
    "zeros of the assembler's",
    Ends.IN_NO_PROGRAM,
    'asm(".data\\n.zero 8000000000\\n.text");\nint main() {}\n',
)
add(
    "a loop of the assembler's",
    Ends.IN_NO_PROGRAM,
    'asm(".rept 1000000000\\nnop\\n.endr");\nint main() {}\n',
)
add(
    "messages without end",
    Ends.IN_NO_PROGRAM,
    "".join(f"int f{n}() {{ return undeclared_{'x' * 200}_{n}; }}\n" for n in range(60_000)),
)
add(
    "brackets without end",
    Ends.IN_NO_PROGRAM,
    f"int main() {{ return {'(' * 300_000}1{')' * 300_000}; }}\n",
)
add(
    "a plugin, and another linker script",
    Ends.IN_NO_PROGRAM,
    '#pragma GCC plugin "@open@/plugin.so"\nasm(".include \\"@secret@\\"");\nint main() {}\n',
)
add(
    "a library of the host's by a linker's directive",
    Ends.IN_NO_PROGRAM,
    'asm(".section .drectve\\n.ascii \\"-L@folder@\\"\\n.text\\n.incbin \\"@gift@\\"");\nint main() {}\n',
)

# -- by the program ----------------------------------------------------------------------------------------------------

add(
    "files by their path",
    Ends.IN_A_REFUSAL,
    r"""
    int main() {
      for (const char* path : {"@secret@", "@link@", "@shared@", "@table@", "/etc/passwd", "/etc/shadow",
           "/proc/self/environ", "/proc/self/maps", "/proc/@runner@/environ", "/proc/@victim@/mem", "/sys/kernel/mm",
           "/dev/mem", "/dev/sda", "/dev/shm", "/proc/self/root@secret@", "/tmp/../..@secret@", "/home", "/mnt"})
        attempt(path, can_open(path, O_RDONLY));
      for (const char* path : {"@open@/new", "@shared@", "/usr/lib/new", "/new", "/dev/new", "@library@",
                               "/var/tmp/new"})
        attempt(path, can_open(path, O_WRONLY | O_CREAT));
      puts("end");
    }
    """,
)
add(
    "the compiler, its headers, and what was compiled",
    Ends.IN_A_REFUSAL,
    r"""
    int main() {
      for (const char* path : {"/usr/bin/g++", "/usr/bin/gcc", "/usr/bin/as", "/usr/bin/ld", "/usr/include/stdio.h",
                               "/bin/sh", "/usr/bin/env", "program.cpp", "../tmp/program.cpp", "program.o"})
        attempt(path, can_open(path, O_RDONLY));
      DIR* folder = opendir("/tmp");
      for (dirent* entry; (entry = readdir(folder));)
        if (entry->d_name[0] != '.') attempt(entry->d_name, strcmp(entry->d_name, "program") != 0);
      puts("end");
    }
    """,
)
add(
    "sockets",
    Ends.IN_A_REFUSAL,
    r"""
    int main() {
      for (int family : {AF_INET, AF_INET6, AF_UNIX, 16, 17, 38, 40})
        for (int kind : {SOCK_STREAM, SOCK_DGRAM, SOCK_RAW}) attempt("socket", socket(family, kind, 0) >= 0);
      int pair[2];
      socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
      sockaddr_in place = {};
      place.sin_family = AF_INET; place.sin_port = htons(@tcp@); place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      attempt("connect a pair", connect(pair[0], (sockaddr*)&place, sizeof place) == 0);
      attempt("sendto", sendto(pair[0], "x", 1, 0, (sockaddr*)&place, sizeof place) == 1 && errno == 0);
      puts("end");
    }
    """,
)
add(
    "calls of the kernel that are closed",
    Ends.IN_A_REFUSAL,
    r"""
    int main() {
      door("ptrace", 101, 16, getppid()); door("mount", 165); door("unshare", 272, 0x10000000); door("setns", 308);
      door("bpf", 321); door("io_uring_setup", 425, 8); door("memfd_create", 319, (long)"x"); door("keyctl", 250);
      door("userfaultfd", 323); door("perf_event_open", 298); door("process_vm_readv", 310, getppid());
      door("pidfd_getfd", 438); door("init_module", 175); door("chroot", 161, (long)"/"); door("pivot_root", 155);
      door("add_key", 248); door("shmget", 29, @key@, 4096, 01600); door("msgget", 68, @key@, 01600);
      door("name_to_handle_at", 303); door("open_by_handle_at", 304); door("personality", 135, 0x40000);
      door("clone", 56, 0x10000000 | SIGCHLD); door("clone3", 435); door("seccomp", 317); door("1000", 1000);
      door("sethostname", 170, (long)"x", 1); door("reboot", 169); door("vmsplice", 278); door("quotactl", 179);
      puts("end");
    }
    """,
)
add(
    "calls of another architecture",
    Ends.AT_A_LIMIT,
    r"""
    int main() {
      long result;
      asm volatile("int $0x80" : "=a"(result) : "a"(20L) : "memory");
      printf("through\tint 0x80\t%ld\n", result);
    }
    """,
    "crash",
)
add(
    "calls by the numbers of x32",
    Ends.AT_A_LIMIT,
    r"""
    int main() { printf("through\tx32\t%ld\n", kernel(0x40000000 + 39)); }
    """,
    "crash",
)
add(
    "signals to everyone",
    Ends.IN_A_REFUSAL,
    r"""
    int main() {
      for (int pid : {@runner@, @victim@}) attempt("kill", pid > 99 && kill(pid, SIGTERM) == 0);
      signal(SIGTERM, SIG_IGN);
      kill(-1, SIGTERM); kill(1, SIGKILL); kill(0, SIGTERM); kill(getppid(), SIGSTOP);
      puts("end");
    }
    """,
)
add(
    "what the report is written to",
    Ends.IN_A_REFUSAL,
    r"""
    int main() {
      for (int file = 3; file < 64; ++file) attempt(std::to_string(file), write(file, "done 42", 7) > 0);
      puts("end");
    }
    """,
)
add(
    "privileges of a program that is root's",
    Ends.IN_A_REFUSAL,
    r"""
    int main() {
      attempt("setuid", setuid(0) == 0); attempt("setgid", setgid(0) == 0); attempt("nice", setpriority(0, 0, -5) == 0);
      rlimit more = {RLIM_INFINITY, RLIM_INFINITY};
      for (auto kind : {RLIMIT_AS, RLIMIT_CPU, RLIMIT_NPROC, RLIMIT_FSIZE, RLIMIT_NOFILE})
        attempt("more of a limit", setrlimit(kind, &more) == 0);
      attempt("a device", mknod("disk", S_IFBLK | 0666, 0x800) == 0);
      puts("end");
    }
    """,
)
add(
    "memory",
    Ends.AT_A_LIMIT,
    "int main() { for (;;) memset(new char[1 << 20], 1, 1 << 20); }",
    "crash",
)
add("the stack", Ends.AT_A_LIMIT, "int f(int n) { volatile char a[999]; a[n % 9] = 1; return f(n + 1) + a[n % 9]; }\n"
    "int main() { return f(0); }", "crash")  # fmt: skip
add("processes", Ends.AT_A_LIMIT, "int main() { for (;;) fork(); }", "time cpu")
add(
    "threads",
    Ends.AT_A_LIMIT,
    "int main() { for (;;) new std::thread([] { for (;;) pause(); }); }",
    "crash",
)
add("output", Ends.AT_A_LIMIT, 'int main() { for (;;) puts("0123456789"); }', "output")
add("messages", Ends.AT_A_LIMIT, 'int main() { for (;;) fputs("0123456789", stderr); }', "output")
add("the scratch folder", Ends.AT_A_LIMIT, r"""
    int main() {
      char block[4096] = {1};
      for (int n = 0, file = -1;; ++n) {
        if (n % 512 == 0) file = open(std::to_string(n).c_str(), O_WRONLY | O_CREAT, 0666);
        if (write(file, block, sizeof block) < 0) return 1;
      }
    }
    """, "error")  # fmt: skip
add("a file larger than a file may be", Ends.AT_A_LIMIT, r"""
    int main() { int file = open("f", O_WRONLY | O_CREAT, 0666); return pwrite(file, "x", 1, 1L << 40) != 1; }
    """, "crash")  # fmt: skip
add("processor time against its signal", Ends.AT_A_LIMIT,
    "int main() { for (int n = 1; n < 64; ++n) signal(n, SIG_IGN); for (;;); }", "cpu")  # fmt: skip
add("sleep", Ends.AT_A_LIMIT, "int main() { for (;;) pause(); }", "time")
add("its own code", Ends.AT_A_LIMIT, "int main() { *(volatile char*)main = 1; }", "crash")
add(
    "a child of a child in a session of its own",
    Ends.IN_A_DEAD_PROGRAM,
    r"""
    int main() {
      if (fork() == 0) {
        setsid();
        if (fork() == 0) {
          for (int n = 0; n < 64; ++n) { close(n); signal(n, SIG_IGN); }
          for (;;) pause();
        }
        _exit(0);
      }
      usleep(100000);
    }
    """,
)
add(
    "a child that holds the output open",
    Ends.IN_A_DEAD_PROGRAM,
    "int main() { if (fork() == 0) for (;;) { pause(); } }",
)
add(
    "a child that forks faster than it is killed",
    Ends.IN_A_DEAD_PROGRAM,
    "int main() { if (fork() == 0) for (;;) { if (fork()) _exit(0); setsid(); } usleep(50000); }",
)


def as_c(python: str, program: str) -> str:
    """The source in C of a program that becomes this program in Python. ``python``: the interpreter's path."""
    data = ",".join(map(str, [*program.encode(), 0]))
    arguments = '"-s", "-S", "-P", "-X", "utf8", "-c"'
    return (
        f"#include <unistd.h>\nstatic const unsigned char text[] = {{{data}}};\n"
        f'int main(void) {{ execl("{python}", "{python}", {arguments}, text, (char*)0); return 99; }}\n'
    )
