#!/bin/sh
# Installs what pip cannot: mpirun (openmpi-bin), with which tests/launch starts ranks for real.
# One line says what was done or why nothing was. It never fails: without mpirun its tests are skipped.
set -u

say() {
    echo "system packages: $1"
    exit 0
}

command -v mpirun >/dev/null 2>&1 && say "mpirun is there"
command -v apt-get >/dev/null 2>&1 || say "no apt-get here; for the mpirun tests install Open MPI yourself"
[ "$(id -u)" = 0 ] || say "not root; for the mpirun tests run: sudo apt-get install openmpi-bin"

# A frozen mirror or a missing network must end this soon, not hold up the tests that need no mpirun.
install() {
    DEBIAN_FRONTEND=noninteractive timeout 180 apt-get -qq -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60 \
        install -y --no-install-recommends openmpi-bin >/dev/null 2>&1 </dev/null
}

install && say "installed openmpi-bin"
# A fresh container has no package lists yet.
timeout 120 apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 update \
    >/dev/null 2>&1 </dev/null
install && say "installed openmpi-bin"
say "openmpi-bin could not be installed (apt-get failed); the mpirun tests are skipped"
