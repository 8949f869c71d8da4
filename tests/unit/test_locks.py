from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chunktune.errors import EnvironmentFailedError
from chunktune.locks import holding, holding_directory, lock_directory

HOLDER = """
import sys
from pathlib import Path
from chunktune.locks import holding, holding_directory
kind, name, output = sys.argv[1:]
with holding([name], output) if kind == "device" else holding_directory(Path(name)):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return lock_directory()


@contextmanager
def held_elsewhere(kind: str, name: str, output: str = "/their/out") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a device, or a directory, until the block ends or it is killed."""
    command = [sys.executable, "-c", HOLDER, kind, name, output]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def lock_files() -> list[Path]:
    return sorted(lock_directory().iterdir())


def test_the_second_is_told_pid_since_and_directory_and_what_to_do() -> None:
    with held_elsewhere("device", "the CPU", "/their/out") as holder:
        with pytest.raises(EnvironmentFailedError) as refused, holding(["the CPU"], "/my/out"):
            pytest.fail("two hold one device")
        since = json.loads(lock_files()[0].read_text())["since"]
    assert str(refused.value) == (
        f"the CPU is in use by another sweep (pid {holder.pid}, since {since}, output directory /their/out); "
        "a sweep wants its devices to itself: wait for it, or --share to measure beside it"
    )
    assert refused.value.exit_code == 6


def test_other_devices_may_be_held_at_the_same_time() -> None:
    with held_elsewhere("device", "GPU a"), holding(["GPU b", "GPU c", "GPU b"], "out"):
        assert len(lock_files()) == 3


def test_one_device_of_many_is_enough_and_the_rest_is_let_go_again() -> None:
    with held_elsewhere("device", "GPU b"):
        with pytest.raises(EnvironmentFailedError, match="GPU b is in use"), holding(["GPU a", "GPU b"], "out"):
            pytest.fail("two hold one device")
        with holding(["GPU a"], "out"):
            pass


@pytest.mark.parametrize("kind", ["device", "directory"])
def test_a_holder_that_is_killed_lets_go(tmp_path: Path, kind: str) -> None:
    name = str(tmp_path) if kind == "directory" else "the CPU"
    with held_elsewhere(kind, name) as holder:
        holder.send_signal(signal.SIGKILL)
        assert holder.wait() == -signal.SIGKILL
        if kind == "directory":
            with holding_directory(tmp_path):
                return
        assert json.loads(lock_files()[0].read_text())["pid"] == holder.pid, "what it wrote still stands there"
        with holding(["the CPU"], "/my/out"):
            signed = json.loads(lock_files()[0].read_text())
        assert (signed["pid"], signed["output_dir"]) == (os.getpid(), "/my/out")


def test_it_is_let_go_at_the_end_of_the_block_and_by_an_error() -> None:
    for _ in range(2):
        with pytest.raises(KeyError), holding(["the CPU"], "out"):
            raise KeyError
        with holding(["the CPU"], "out"):
            pass
    assert lock_files()[0].read_text() == "", "nobody is named who is gone"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}', "\x1b[31m", "9" * 9999])
def test_what_stands_in_a_lock_is_no_lock_and_no_danger(text: str) -> None:
    with holding(["the CPU"], "out"):
        pass
    (file,) = lock_files()
    file.write_text(text)
    with holding(["the CPU"], "out"):
        assert json.loads(file.read_text())["pid"] == os.getpid()
        file.write_text(text)  # a holder whose words cannot be read is still a holder
        with pytest.raises(EnvironmentFailedError) as refused, holding(["the CPU"], "out"):
            pytest.fail("two hold one device")
    assert "the CPU is in use by another sweep (which did not say who it is)" in str(refused.value)


@pytest.mark.parametrize("name", ["GPU GPU-3f2a/../../x", "../../../x", "a\nb\0c", "ü € \u202e", ".", "", "x" * 200])
def test_a_device_of_any_name_has_a_file_inside_the_directory(name: str) -> None:
    with holding([name], "out"):
        (file,) = lock_files()
        assert file.is_file() and file.parent == lock_directory()
        with pytest.raises(EnvironmentFailedError, match="is in use"), holding([name], "out"):
            pytest.fail("two hold one device")


def test_a_lock_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file stands where the directory should")
    with pytest.raises(EnvironmentFailedError) as refused, holding(["the CPU"], "out"):
        pytest.fail("held without a lock")
    assert "the lock of the CPU cannot be made (Not a directory)" in str(refused.value)
    assert "give a writable XDG_RUNTIME_DIR, or --share to go without" in str(refused.value)


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    """Where locks lie among temporary files, anyone may have made the directory first."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    lock_directory().mkdir(parents=True)
    (lock_directory() / "the_CPU.lock").symlink_to(precious)
    with pytest.raises(EnvironmentFailedError, match="the lock of the CPU cannot be made"), holding(["the CPU"], "o"):
        pytest.fail("held what a link points at")
    assert precious.read_text() == "mine"


def test_a_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = lock_directory()
    directory.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    monkeypatch.setattr("chunktune.locks.lock_directory", lambda: directory)
    with pytest.raises(EnvironmentFailedError, match="its directory is another user's"), holding(["the CPU"], "out"):
        pytest.fail("trusted a stranger's directory")


def test_an_output_directory_takes_one_sweep_at_a_time(tmp_path: Path) -> None:
    with held_elsewhere("directory", str(tmp_path)):
        with pytest.raises(EnvironmentFailedError) as refused, holding_directory(tmp_path):
            pytest.fail("two write one journal")
        (tmp_path / "other").mkdir()
        with holding_directory(tmp_path / "other"):
            pass
    assert str(refused.value).startswith(f"{tmp_path}: another sweep is running there")
    with holding_directory(tmp_path):
        assert list(tmp_path.iterdir()) == [tmp_path / "other"], "it leaves no file behind"


def test_a_file_system_that_locks_no_directories_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("chunktune.locks.fcntl.flock", refuse)
    with holding_directory(tmp_path):
        pass
