"""A disk that is really full, or really read-only: a tiny file system in a mount namespace of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
set -u
mount -t tmpfs -o size=16k none "$1"
shift
home=$1
shift
out=$home/run
"$@" --out "$out"; echo "full $?"
cat "$out"/run.toml > /dev/null; echo "folder $?"
mount -o remount,size=20m "$home"
"$@" --out "$out"; echo "room $?"
sha256sum < "$out/groups.csv"
mount -o remount,ro "$home"
"$@" --out "$home/other"; echo "read-only $?"
"""


def namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not namespaces(), reason="no mount namespace can be made here")
def test_a_full_disk_and_a_read_only_one(tmp_path, table):
    file = tmp_path / "people.csv"
    table().to_csv(file, index=False)
    home = tmp_path / "small"
    home.mkdir()
    options = "--clients 2 --target loan --sensitive sex --method fedavg --steps 40 --batch-size 16 --quiet"
    fit = [sys.executable, "-m", "fedbilevel.cli", "fit", file, *options.split()]
    said = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SCRIPT, "sh", home, home, *fit],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    whole = tmp_path / "whole"
    subprocess.run([*fit, "--out", whole], capture_output=True, timeout=600, check=True)
    digest = hashlib.sha256((whole / "groups.csv").read_bytes()).hexdigest() + "  -"
    assert said.stdout.splitlines() == ["full 2", "folder 0", "room 0", digest, "read-only 2"]
    full, read_only = said.stderr.splitlines()
    assert "No space left on device" in full
    assert "what was saved there before is intact" in full
    assert "Read-only file system" in read_only
