"""Files for shared memory: whose they are, what a reader believes, what a sweep removes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.m3_serving.gateway.wire import shared_memory as shm

DATA = bytes(range(256)) * 40


def put(directory, name=None, data=DATA):
    name = name or shm.new_name()
    shm.write(str(directory), name, [memoryview(data[:1000]), memoryview(data[1000:])])
    return name


def test_what_is_written_is_read_from_any_offset(tmp_path):
    name = put(tmp_path)
    assert os.stat(tmp_path / name).st_mode & 0o777 == 0o600
    for offset, count in ((0, len(DATA)), (17, 1000), (len(DATA), 0), (len(DATA) - 1, 1)):
        out = bytearray(count)
        shm.read_into(str(tmp_path), name, offset, memoryview(out))
        assert out == DATA[offset : offset + count]
    with pytest.raises(ValueError, match="must have 10241 bytes, got 10240"):
        shm.read_into(str(tmp_path), name, 1, memoryview(bytearray(len(DATA))))
    shm.remove(str(tmp_path), name)
    shm.remove(str(tmp_path), name)
    with pytest.raises(FileNotFoundError):
        shm.read_into(str(tmp_path), name, 0, memoryview(bytearray(1)))


def test_a_file_that_exists_is_never_written_over(tmp_path):
    name = put(tmp_path)
    with pytest.raises(FileExistsError):
        put(tmp_path, name)
    assert (tmp_path / name).read_bytes() == DATA


@pytest.mark.parametrize(
    "name", ["", ".", "..", "passwd", "/etc/passwd", "m3s-1-1-1-0123456789abcde/", "m3s-1-1-1-"]
)
def test_other_names_are_neither_read_nor_removed(tmp_path, name):
    (tmp_path / "passwd").write_text("x")
    with pytest.raises(ValueError, match="one of ours"):
        shm.read_into(str(tmp_path), name, 0, memoryview(bytearray(1)))
    shm.remove(str(tmp_path), name)
    assert os.listdir(tmp_path) == ["passwd"]


def test_names_are_new_each_time():
    names = {shm.new_name() for _ in range(100)}
    assert len(names) == 100 and all(map(shm.is_name, names))


def test_a_sweep_removes_what_dead_processes_left_and_nothing_else(tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(Path(shm.__file__).parents[3])!r})\n"
        "from m3_serving.gateway.wire import shared_memory as shm\n"
        f"name = shm.new_name(); shm.write({str(tmp_path)!r}, name, [memoryview(b'x')])\n"
        "print(name, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    theirs = process.stdout.readline().strip()
    own = put(tmp_path)
    prefix, namespace, pid, started, letters = own.split("-")
    reused = "-".join((prefix, namespace, pid, str(int(started) - 1), letters))
    elsewhere = "-".join((prefix, str(int(namespace) + 1), "4194305", "1", letters))
    never = "-".join((prefix, namespace, "4194305", "1", letters))
    for name in (reused, elsewhere, never):
        put(tmp_path, name)
    (tmp_path / "somebody's").write_text("x")
    assert set(shm.sweep(str(tmp_path))) == {reused, never}
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert shm.sweep(str(tmp_path)) == [theirs]
    assert set(os.listdir(tmp_path)) == {own, elsewhere, "somebody's"}
    assert shm.sweep(str(tmp_path / "missing")) == []


def test_identity(tmp_path):
    assert shm.identity(str(tmp_path)) == shm.identity(f"{tmp_path}/../{tmp_path.name}") != ""
    (tmp_path / "x").mkdir()
    assert shm.identity(str(tmp_path)) != shm.identity(str(tmp_path / "x"))
    assert shm.identity(str(tmp_path / "missing")) == ""
