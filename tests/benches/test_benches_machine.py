"""What is seen of a machine that makes figures untrustworthy, in trees of files as the kernel has them; and the progress."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benches.cgroup import allowance
from benches.doubts import Usage, doubts_of_system, load_now
from benches.machine import Machine, commit, upstream
from tests.support import ROOT

_GIB = 1 << 30


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.1.102", "6.1.102"),
        ("6.1.102-vendor-v595", "6.1.102"),
        ("6.1.102-112.189.vendor.x86_64", "6.1.102"),
        ("6.8.0-45-generic", "6.8.0"),
        ("5.15.167.4-vendor-two", "5.15.167"),
        ("6.12.0+deb13-amd64", "6.12.0"),
        ("6.12-rc3", "6.12-rc3"),
        ("6.12.0-rc3-next", "6.12.0-rc3"),
        ("something else", "something else"),
    ],
)
def test_kernel_is_its_upstream_version(release: str, version: str) -> None:
    """What a vendor has put behind a kernel's version is no part of the machine's description."""
    assert upstream(release) == version


def test_commit_of_a_checkout(tmp_path: Path) -> None:
    """A checkout has its commit, with a mark where files differ from it; a directory that is none has nothing."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    assert commit(tmp_path) == ""
    (tmp_path / "file").write_text("a")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "m"], ["tag", "-m", "t", "v1"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert len(commit(tmp_path)) == 12
    assert head.startswith(commit(tmp_path))
    (tmp_path / "below").mkdir()
    assert commit(tmp_path / "below") == ""
    (tmp_path / "file").write_text("b")
    assert commit(tmp_path) == f"{head[:12]}+"


def test_machine_names_no_build_of_its_kernel(tmp_path: Path) -> None:
    """The description has the upstream version alone."""
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?(-rc\d+)?", Machine.look(tmp_path).kernel)


def write(top: Path, files: dict[str, str]) -> None:
    """Write files below a directory."""
    for name, content in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def machine(top: Path) -> tuple[Path, Path]:
    """Make the files of a machine on which nothing is wrong; return those of /sys and of /proc."""
    write(
        top,
        {
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/class/power_supply/BAT0/status": "Full\n",
            "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: 1048576 kB\nSwapFree: 1048576 kB\n",
            "proc/stat": "cpu 0 0 0 0 0 0 0 0 0 0\n",
            "proc/vmstat": "pswpin 5\npswpout 6\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": f"30 24 0:26 / {top}/cgroup rw,nosuid - cgroup2 cgroup2 rw\n",
        },
    )
    (top / "cgroup").mkdir()
    return top / "sys", top / "proc"


@pytest.mark.parametrize(("running", "blocked", "load"), [(1, 0, 0.0), (0, 0, 0.0), (3, 0, 2.0), (1, 2, 2.0), (4, 1, 4.0)])
def test_load_is_that_of_the_moment(running: int, blocked: int, load: float, tmp_path: Path) -> None:
    """Who runs or waits for a disk counts, except who looks."""
    write(tmp_path, {"stat": f"cpu  1 2 3 4\nctxt 12\nprocs_running {running}\nprocs_blocked {blocked}\nsoftirq 1 2 3\n"})
    assert load_now(proc=tmp_path) == load


def test_a_busy_process_is_load() -> None:
    """Somebody who computes is seen at once, and not a minute later."""
    with subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        load = load_now()
        busy.kill()
    assert load > 0.7


def test_good_machine_has_no_doubts(tmp_path: Path) -> None:
    """Nothing is said of a machine on which nothing is wrong."""
    sys_, proc = machine(tmp_path)
    assert doubts_of_system(4, sys=sys_, proc=proc) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n", "scaling governor performance, powersave"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", "transparent huge pages are off"),
        ("sys/class/power_supply/BAT0/status", "Discharging\n", "runs on its battery"),
        ("proc/meminfo", "MemTotal: 16777216 kB\nSwapTotal: 2097152 kB\nSwapFree: 0 kB\n", "2.0 GiB are swapped out"),
        ("cgroup/memory.max", f"{2 * _GIB}\n", "2.0 GiB of memory, page cache included, of the machine's 16.0"),
        ("cgroup/cpu.max", "150000 100000\n", "1.5 of 4 cores"),
    ],
)
def test_each_doubt_is_said(name: str, content: str, said: str, tmp_path: Path) -> None:
    """Each thing that is wrong is named, alone."""
    sys_, proc = machine(tmp_path)
    write(tmp_path, {name: content})
    (doubt,) = doubts_of_system(4, sys=sys_, proc=proc)
    assert said in doubt


def test_what_came_in_between_is_said(tmp_path: Path) -> None:
    """Heat, swapping and a container's quota during a run are named."""
    sys_, proc = machine(tmp_path)
    write(tmp_path, {"cgroup/cpu.stat": "usage_usec 5\nthrottled_usec 1000000\n"})
    usage = Usage(sys=sys_, proc=proc)
    assert usage.doubts(4) == []
    write(
        tmp_path,
        {
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "7\n",
            "proc/vmstat": "pswpin 5\npswpout 106\n",
            "cgroup/cpu.stat": "usage_usec 5\nthrottled_usec 3500000\n",
        },
    )
    hot, swapped, stopped = usage.doubts(4)
    assert "4 times since they were too hot" in hot
    assert "100 pages were swapped" in swapped
    assert "stopped it for 2.5 s" in stopped


def test_limits_of_groups_above_count(tmp_path: Path) -> None:
    """Version 2: the least limit on the way up, less what is used, the page cache being free."""
    _, proc = machine(tmp_path)
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "cgroup/outer/memory.max": f"{4 * _GIB}\n",
            "cgroup/outer/memory.current": f"{3 * _GIB}\n",
            "cgroup/outer/memory.stat": f"anon {_GIB}\nfile {2 * _GIB}\n",
            "cgroup/outer/cpu.max": "max 100000\n",
            "cgroup/outer/inner/memory.max": "max\n",
            "cgroup/outer/inner/cpu.max": "50000 100000\n",
        },
    )
    found = allowance(proc)
    assert (found.memory_bytes, found.memory_left, found.cores) == (4 * _GIB, 3 * _GIB, 0.5)


def test_limits_of_version_1(tmp_path: Path) -> None:
    """Version 1, in a container that shows its own group at the place of all, while the path is the host's."""
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
            "proc/self/mountinfo": (
                f"30 24 0:26 / {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
                f"31 24 0:27 /docker/abc {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            ),
            "memory/memory.limit_in_bytes": f"{_GIB}\n",
            "memory/memory.usage_in_bytes": f"{_GIB // 2}\n",
            "memory/memory.stat": "cache 0\ntotal_cache 0\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "cpu/cpu.stat": "nr_periods 0\nthrottled_time 2000000000\n",
        },
    )
    found = allowance(tmp_path / "proc")
    assert (found.memory_bytes, found.memory_left, found.cores, found.throttled) == (_GIB, _GIB // 2, None, 2.0)


def on_a_terminal(tmp_path: Path, modules: Path | None) -> str:
    """Run a benchmark with its progress on a terminal; give what the terminal got."""
    path = os.pathsep.join([*([str(modules)] if modules else []), str(ROOT)])
    arguments = ["memory", "--size", "smallest", "--dir", str(tmp_path / "s"), "--results", str(tmp_path / "r")]
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(ours, "rb", buffering=0, closefd=False) as terminal:
            process = subprocess.Popen(
                [sys.executable, "-m", "benches", "run", *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "120"},
                stdout=subprocess.DEVNULL,
                stderr=theirs,
            )
            os.close(theirs)
            shown = b""
            while True:
                try:
                    part = terminal.read(4096)
                except OSError:  # so a terminal ends
                    break
                if not part:
                    break
                shown += part
            assert process.wait(60) == 0
    finally:
        os.close(ours)
    return shown.decode()


def test_progress_on_a_terminal_is_one_line(tmp_path: Path) -> None:
    """With rich the line is drawn over and over, and the second time it knows how long it will take."""
    first = on_a_terminal(tmp_path, None)
    assert "\x1b[2K" in first
    assert re.search(r"saving  \(\d+ s\)", first)
    (path,) = (tmp_path / "r").glob("*.json")
    path.write_text(re.sub(r'"seconds": [0-9.]+', '"seconds": 500.0', path.read_text(), count=1))
    assert re.search(r"about 8 min left of this benchmark", on_a_terminal(tmp_path, None))


def test_progress_without_rich_is_plain_lines(tmp_path: Path) -> None:
    """Without rich installed a terminal gets what a log gets."""
    (tmp_path / "modules" / "rich").mkdir(parents=True)
    (tmp_path / "modules" / "rich" / "__init__.py").write_text("raise ImportError('not here')")
    shown = on_a_terminal(tmp_path, tmp_path / "modules")
    assert "    saving\r\n" in shown
    assert "\x1b" not in shown


def test_workloads_need_neither_plots_nor_progress() -> None:
    """Importing the workloads imports neither matplotlib nor rich."""
    program = "import sys, benches.workloads, benches.alone; sys.exit(bool({'matplotlib', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
