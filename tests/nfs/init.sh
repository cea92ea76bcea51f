#!/bin/sh
# The first program of the machine of kernel.py, which gives it OUT, PYTHON, REPO and MODULES.
set -eu
power_off() { "$PYTHON" -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'; }
trap power_off EXIT
export PATH PYTHONPATH="$REPO" PYTHONDONTWRITEBYTECODE=1 TMPDIR=/run/tmp HOME=/run/home
mount -t proc proc /proc
mount -t sysfs sys /sys
for folder in /run /var/lib /mnt /srv; do
    mount -t tmpfs none "$folder"
done
mkdir -p /run/tmp /run/home /run/bin /mnt/out
cp -a /etc /run/etc
mount --bind /run/etc /etc
mount -t hostfs none /mnt/out -o "$OUT"
IFS=:
for module in $MODULES; do
    insmod "$module"
done
cd "$REPO"
"$PYTHON" -m tests.nfs.inside /mnt/out >/mnt/out/inside.log 2>&1
