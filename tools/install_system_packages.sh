#!/bin/sh
# Installs what pip cannot: mpirun (openmpi-bin), with which tests/launch starts ranks for real, ip and tc
# (iproute2), with which tests/cluster makes hosts, a compiler with libjpeg-turbo's header (gcc,
# libjpeg-dev), with which the region decoder is built, and g++, which torch.compile needs on a CPU; by
# name, chromium and chromium-driver, with which tests/watch looks at pages. Names of packages as
# arguments: only these. `--missing` installs nothing and prints those that are not there, one per line.
# One line says what was done or why nothing was. It never fails: tests/allowed_skips.py decides whether
# tests may be skipped without them.
set -u

say() {
    echo "system packages: $1"
    exit 0
}

list_only=""
[ "${1:-}" = --missing ] && list_only=yes && shift

# Folders of administration are not on everybody's path.
PATH="$PATH:/usr/sbin:/sbin"
missing=""
for package in ${*:-openmpi-bin iproute2 gcc g++ libjpeg-dev}; do
    case "$package" in
        openmpi-bin) program=mpirun ;;
        iproute2) program=tc ;;
        libjpeg-dev) program=jpeglib.h ;;
        chromium-driver) program=chromedriver ;;
        *) program=$package ;;
    esac
    case "$program" in
        # A header: as a compiler would look for it, on Debian and elsewhere.
        *.h) [ -n "$(find /usr/include /usr/local/include -maxdepth 2 -name "$program" 2>/dev/null)" ] &&
            continue ;;
    esac
    command -v "$program" >/dev/null 2>&1 || missing="$missing $package"
done
missing="${missing# }"

[ -z "$list_only" ] || { [ -z "$missing" ] || printf '%s\n' $missing; exit 0; }

[ -n "$missing" ] || say "all are there"
command -v apt-get >/dev/null 2>&1 || say "no apt-get here; for all tests install yourself: $missing"
[ "$(id -u)" = 0 ] || say "not root; for all tests run: sudo apt-get install $missing"

# A frozen mirror or a missing network must end this soon, not hold up the tests that need no package.
install() {
    # Unquoted: one argument for each package.
    DEBIAN_FRONTEND=noninteractive timeout 180 apt-get -qq -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60 \
        install -y --no-install-recommends $missing >/dev/null 2>&1 </dev/null
}

install && say "installed $missing"
# A fresh container has no package lists yet.
timeout 120 apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 update \
    >/dev/null 2>&1 </dev/null
install && say "installed $missing"
say "$missing could not be installed (apt-get failed)"
