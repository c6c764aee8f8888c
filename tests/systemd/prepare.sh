#!/bin/sh
# Makes what tests/systemd boots: a Debian root file system with systemd, and a virtual environment
# in it that has all of kvd's dependencies, those of the extra `remote` among them. kvd itself comes
# as a wheel, which each test installs.
#
#   prepare.sh DIRECTORY PYTHON [SUITE]
#
# DIRECTORY is outside the repository, may be deleted at any time, and gets
#   SUITE/       the root file system (350 MB); made once, and again when kvd's dependencies change
#   SUITE.fit    what it was made for
#   wheels/      the dependencies, in case it has to be made again
#   kvd/         the wheel of this tree; made at every call
# PYTHON is the one of the project's virtual environment. SUITE is a Debian release: bookworm
# (systemd 252, the default) or trixie (systemd 257).
set -eu

directory=$1
python=$2
suite=${3:-bookworm}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
repository=$(cd "$(dirname "$0")/../.." && pwd)
root=$directory/$suite

fail() {
    echo "make test-systemd: $1" >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || fail "boots a Linux container; this is $(uname -s)"
[ "$(id -u)" = 0 ] || fail "booting a container needs root: run it with sudo, or leave it out"
if ! command -v systemd-nspawn >/dev/null || ! command -v debootstrap >/dev/null; then
    command -v apt-get >/dev/null ||
        fail "install systemd-nspawn and debootstrap first (only on Debian this does it for you)"
    apt-get update -qq
    apt-get install -qq --yes --no-install-recommends systemd-container debootstrap
fi

mkdir -p "$directory"
# With what reaches object stores. The extra `engine` is gigabytes, and taken from PYTHON's environment if that fits.
dependencies=$("$python" - "$repository/pyproject.toml" <<'PYTHON'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["remote"], sep="\n")
PYTHON
)

fit=$({ echo "$dependencies" && cat "$repository/constraints.txt" "$0"; } | sha256sum)
if [ "$(cat "$root.fit" 2>/dev/null)" != "$fit" ] || [ ! -d "$root" ]; then
    rm -rf "$root" "$root.partial"
    debootstrap --variant=minbase \
        --include=systemd,systemd-sysv,dbus,python3,python3-venv,procps,iproute2 \
        "$suite" "$root.partial" "$mirror" || fail "debootstrap failed: is $mirror reachable?"
    chroot "$root.partial" python3 -m venv /opt/cachedattention
    # Fetched out here, where pip is configured for this machine's network.
    version=$(chroot "$root.partial" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    # shellcheck disable=SC2086  # one argument a dependency
    (set -f && IFS='
' && "$python" -m pip download --quiet --dest "$directory/wheels" \
        --only-binary=:all: --python-version "$version" \
        --constraint "$repository/constraints.txt" $dependencies)
    mkdir "$root.partial/mnt/wheels"
    cp "$directory"/wheels/*.whl "$root.partial/mnt/wheels"
    # shellcheck disable=SC2086
    (set -f && IFS='
' && env -i PATH="$PATH" chroot "$root.partial" /opt/cachedattention/bin/pip install --quiet --no-index \
        --find-links /mnt/wheels $dependencies)
    rm -rf "$root.partial/mnt/wheels" "$root.partial"/var/cache/apt/archives/*.deb
    mv "$root.partial" "$root"
    echo "$fit" >"$root.fit"
fi

rm -rf "$directory/kvd"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$directory/kvd" "$repository"
