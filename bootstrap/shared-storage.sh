#!/usr/bin/env bash
# Sets up the cluster's shared folder on a node, as root; called by node-setup.sh. Idempotent.
#   shared-storage.sh export CLIENTS   on the head: export the folder by NFS to these addresses
#   shared-storage.sh mount SOURCE     mount SOURCE (SERVER:/PATH)
#   shared-storage.sh folders          create the subfolders, on a node with root access
set -euo pipefail

# SHARED_ROOT: test machines use another root folder.
readonly ROOT=${SHARED_ROOT:-}
readonly FOLDER=/srv/tileforge/shared
# hard: programs wait for the server and then continue. With soft, a step would fail with an error or
# SIGBUS, or lose written data. SIGKILL ends such a wait, and `preflight` reports it. With these
# values the kernel logs an unreachable server after 20 s (timeo is in tenths of a second). Each
# mount attempt has a separate timeout.
readonly OPTIONS=hard,timeo=100,retrans=1,noatime,nodev,nosuid
readonly MOUNT_TIMEOUT_S=${SHARED_MOUNT_TIMEOUT_S:-600} # the head can boot later than its workers

fail() {
    echo "error: $*" >&2
    exit 30 # payload.core.errors.ExitCode.BOOTSTRAP
}

# World-writable with the sticky bit, as /tmp, because the login's user ID differs under OS Login.
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
    # NFS 4 needs only port 2049. During grace-time after a start, clients reclaim their open files
    # and new requests wait; the default is 90 s.
    printf '%s\n' "[nfsd]" "threads=16" "vers3=n" "vers4=y" "vers4.0=n" "udp=n" \
        "grace-time=20" "lease-time=20" >"$ROOT/etc/nfs.conf.d/tileforge.conf"
    # root_squash: root on a worker has no root access. fsid=0: the export is the server's root, and
    # file handles stay valid if the head boots with another device number.
    printf '%s %s(rw,sync,root_squash,no_subtree_check,fsid=0)\n' "$FOLDER" "$clients" \
        >"$ROOT/etc/exports.d/tileforge.exports"
    # Needed only for NFS 3; masked, so that no service listens on port 111.
    systemctl mask --now --quiet rpcbind.socket rpcbind.service rpc-statd.service
    systemctl enable --quiet nfs-server.service
    systemctl restart nfs-server.service
}

# Reads the kernel's mount table, because access to the folder could block.
is_mounted() { grep -q "^[^ ]* $FOLDER nfs4\{0,1\} " /proc/self/mounts; }

mount_folder() {
    local source=$1 deadline=$((SECONDS + MOUNT_TIMEOUT_S)) output=""
    local fstab=$ROOT/etc/fstab
    if is_mounted; then return; fi
    install -d -m 0755 "$ROOT$FOLDER"
    sed -i "\|^[^ ]* $FOLDER |d" "$fstab" 2>/dev/null || true
    # nofail: a node boots even if its server is down, and preflight reports it.
    printf '%s %s nfs4 vers=4.1,%s,_netdev,nofail 0 0\n' "$source" "$FOLDER" "$OPTIONS" >>"$fstab"
    until output=$(timeout -k 5 30 mount -t nfs4 -o "vers=4.1,retry=0,$OPTIONS" \
        "$source" "$FOLDER" 2>&1); do
        ((SECONDS < deadline)) ||
            fail "$source could not be mounted within $MOUNT_TIMEOUT_S s: $output"
        sleep 2
    done
}

case "${1:-}" in
export) export_folder "$2" ;;
mount) mount_folder "$2" ;;
folders) make_folders ;;
*) fail "usage: shared-storage.sh export CLIENTS | mount SOURCE | folders" ;;
esac
