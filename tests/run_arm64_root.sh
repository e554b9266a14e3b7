#!/bin/bash
# Cross-compile the package for arm64, put it into a Debian 12 root, run it there under qemu-user, compare with this machine.
#
#     tests/run_arm64_root.sh DIRECTORY [MODEL.gguf]
#     TESTS="tests/kernels tests/core" tests/run_arm64_root.sh DIRECTORY       these tests too, there (slow)
#
# Run as root on Debian with debootstrap, gcc-aarch64-linux-gnu, qemu-user-static and binfmt_misc. PYTHON names a Python 3.11 in
# which this package, cython, setuptools and wheel are installed; MIRROR a Debian mirror. Nothing is compiled or configured under
# the emulator. DIRECTORY keeps the root, so that a second run only builds and compares. Exit status 0: the same answers.
set -euo pipefail

PYTHON=${PYTHON:-python3}
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:?a directory to work in}"
work=$(cd "$1" && pwd)
model=${2:+$(realpath "$2")}
root=$work/root
site=$root/usr/local/lib/python3.11/dist-packages

if [ ! -e "$root/usr/bin/python3.11" ]; then
    echo "== a root of packages, unpacked only"
    debootstrap --arch=arm64 --foreign --variant=minbase --include=python3,libpython3.11-dev,libstdc++6 bookworm "$root" ${MIRROR:-}
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar x -C "$root" --keep-directory-symlink
    done
fi
[ ! -L "$root/proc" ] || { rm "$root/proc" && mkdir "$root/proc"; } # in a container debootstrap leaves a link to itself
binfmt=/proc/sys/fs/binfmt_misc
[ -e $binfmt/register ] || mount -t binfmt_misc none $binfmt
[ -e $binfmt/qemu-aarch64 ] || cat /usr/lib/binfmt.d/qemu-aarch64.conf >$binfmt/register

echo "== cross-compiling"
rm -rf "$work/source" "$work/wheel" "$work/sysconfig"
mkdir -p "$work/source" "$work/sysconfig"
# Sources only: what an ordinary build left here must not be picked up.
(cd "$source" && tar c --exclude='*.so' --exclude='*.o' --exclude='pagedkv/core/*.c' setup.py pyproject.toml README.md LICENSE pagedkv \
    csrc tests) | tar x -C "$work/source"
cp "$root/usr/lib/python3.11/_sysconfigdata__aarch64-linux-gnu.py" "$work/sysconfig"
(
    cd "$work/source"
    export PYTHONPATH=$work/sysconfig _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata__aarch64-linux-gnu
    export _PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc
    export CFLAGS="-I$root/usr/include/python3.11 -idirafter $root/usr/include"
    "$PYTHON" -m pip wheel -q --no-build-isolation --no-deps -w "$work/wheel" .
)
"$PYTHON" - "$work/source/pyproject.toml" >"$work/requirements" <<'PYTHON'
import sys, tomllib
print("\n".join(tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]))
PYTHON
[ -z "${TESTS:-}" ] || printf '%s\n' pytest hypothesis scipy mpmath gguf safetensors >>"$work/requirements"
"$PYTHON" -m pip install -q --upgrade --target "$site" --python-version 3.11 --only-binary=:all: --platform linux_aarch64 \
    --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 -r "$work/requirements" "$work"/wheel/*.whl

echo "== answers of this machine"
"$PYTHON" -P "$work/source/tests/answers.py" $model >"$work/here.json"
rm -rf "$root/tests" "$root/model"
cp -r "$work/source/tests" "$root/tests"
mkdir "$root/model"
[ -z "$model" ] || cp "$model" "$root/model/"

# run CPU COMMAND...: in the root, as on this processor of qemu's; the mounts end with it
run() {
    QEMU_CPU=$1 HOME=/tmp LC_ALL=C.UTF-8 PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin unshare --mount sh -c '
        mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"' "$root" "${@:2}"
}
for cpu in max cortex-a72; do # with NEON dot products, and without
    echo "== $cpu"
    run $cpu python3.11 -P -m pagedkv doctor || true # a processor without the kernels' instructions is a problem it names
    run $cpu python3.11 -P /tests/answers.py ${model:+"/model/$(basename "$model")"} >"$work/$cpu.json"
    cmp "$work/here.json" "$work/$cpu.json"
    echo "== $cpu: the same answers"
done
[ -z "${TESTS:-}" ] || run max sh -c "cd / && python3.11 -P -m pytest -p no:cacheprovider $TESTS"
