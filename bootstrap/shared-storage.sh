#!/usr/bin/env bash
# The cluster's shared folder, as root, on a node; node-setup.sh calls it. Safe to run twice.
#   shared-storage.sh export CLIENTS   on the head: export the folder by NFS to these addresses
#   shared-storage.sh mount SOURCE     mount SOURCE (SERVER:/PATH) there
#   shared-storage.sh folders          make its folders, where root may
set -euo pipefail

# SHARED_ROOT: a test's machine has its files elsewhere.
readonly ROOT=${SHARED_ROOT:-}
readonly FOLDER=/srv/tileforge/shared
# hard: a program waits for its server and goes on with the same bytes. soft would give it an error
# or a SIGBUS in the middle of a step, or lose what it wrote. Such a wait ends by SIGKILL, and
# `preflight` names it. With these values the kernel's log names a server after 20 s (timeo is in
# tenths of a second); each try has a limit of its own.
readonly OPTIONS=hard,timeo=100,retrans=1,noatime,nodev,nosuid
readonly MOUNT_TIMEOUT_S=${SHARED_MOUNT_TIMEOUT_S:-600} # the head may boot later than its workers

fail() {
    echo "error: $*" >&2
    exit 30 # payload.core.errors.ExitCode.BOOTSTRAP
}

# Everyone on a node may write, as in /tmp: the login has another number under OS Login.
make_folders() {
    local name
    install -d -m 1777 "$ROOT$FOLDER"
    for name in data models hub; do
        install -d -m 1777 "$ROOT$FOLDER/$name"
    done
}

export_folder() {
    local clients=$1
    make_folders
    install -d -m 0755 "$ROOT/etc/nfs.conf.d" "$ROOT/etc/exports.d"
    # NFS 4 needs port 2049 alone. For grace-time after a start, clients reclaim what they have open
    # and others wait; the default is 90 s.
    printf '%s\n' "[nfsd]" "threads=16" "vers3=n" "vers4=y" "vers4.0=n" "udp=n" \
        "grace-time=20" "lease-time=20" >"$ROOT/etc/nfs.conf.d/tileforge.conf"
    # root_squash: root on a worker is nobody here. fsid=0: the export is the server's root, and a
    # file's handle stays valid when the head boots with another disk number.
    printf '%s %s(rw,sync,root_squash,no_subtree_check,fsid=0)\n' "$FOLDER" "$clients" \
        >"$ROOT/etc/exports.d/tileforge.exports"
    # For NFS 3 alone; masked, so that nothing listens on port 111.
    systemctl mask --now --quiet rpcbind.socket rpcbind.service rpc-statd.service
    systemctl enable --quiet nfs-server.service
    systemctl restart nfs-server.service
}

# is_mounted: from the kernel's table, as looking at the folder could wait for its server.
is_mounted() { grep -q "^[^ ]* $FOLDER nfs4\{0,1\} " /proc/self/mounts; }

mount_folder() {
    local source=$1 deadline=$((SECONDS + MOUNT_TIMEOUT_S)) said=""
    local fstab=$ROOT/etc/fstab
    if is_mounted; then return; fi
    install -d -m 0755 "$ROOT$FOLDER"
    sed -i "\|^[^ ]* $FOLDER |d" "$fstab" 2>/dev/null || true
    # nofail: a node whose server is away still boots, and preflight says what it lacks.
    printf '%s %s nfs4 vers=4.1,%s,_netdev,nofail 0 0\n' "$source" "$FOLDER" "$OPTIONS" >>"$fstab"
    until said=$(timeout -k 5 30 mount -t nfs4 -o "vers=4.1,retry=0,$OPTIONS" \
        "$source" "$FOLDER" 2>&1); do
        ((SECONDS < deadline)) ||
            fail "$source cannot be mounted within $MOUNT_TIMEOUT_S s: $said"
        sleep 2
    done
}

case "${1:-}" in
export) export_folder "$2" ;;
mount) mount_folder "$2" ;;
folders) make_folders ;;
*) fail "usage: shared-storage.sh export CLIENTS | mount SOURCE | folders" ;;
esac
