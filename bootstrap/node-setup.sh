#!/usr/bin/env bash
# Prepares a new Debian 12 or Ubuntu 24.04 machine for training; cloud-init runs it once, as root.
# Idempotent. Settings: /etc/tileforge/bootstrap.conf. The state file has the progress:
# {schema_version, step, ok, reason, version, sha}; ok is null in progress, then true or false.
set -euo pipefail

readonly EXIT_BOOTSTRAP=30 # payload.core.errors.ExitCode
readonly CONF=/etc/tileforge/bootstrap.conf
readonly STATE=/var/lib/tileforge/bootstrap.json
readonly LOG=/var/log/tileforge-bootstrap.log
readonly SYSCTL=/etc/sysctl.d/90-tileforge.conf
readonly LOCK_TIMEOUT_S=600 # another apt can be running: Ubuntu updates itself at first boot
readonly APT_JOBS=(apt-daily.timer apt-daily-upgrade.timer)

export PYTHONSAFEPATH=1 # no modules from the current folder

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
step=start
finished=
paused=()

say() { printf '%s %s: %s\n' "$(date -u +%FT%TZ)" "$step" "$*"; }

# On stderr, because functions such as own_address print their result on stdout.
fail() {
    say "error: $*" >&2
    exit "$EXIT_BOOTSTRAP"
}

# write_state OK REASON: replaces the file atomically and durably.
write_state() {
    python3 -I - "$STATE" "$step" "$1" "$2" "$VERSION" "$SHA" <<'PYTHON'
import json, os, sys
path, step, ok, reason, version, sha = sys.argv[1:]
reason = reason.encode(errors="surrogateescape").decode(errors="replace")
state = {"schema_version": 1, "step": step, "ok": json.loads(ok), "reason": reason or None,
         "version": version, "sha": sha}
with open(path + ".partial", "w", encoding="utf-8") as file:
    os.fchmod(file.fileno(), 0o644)
    file.write(json.dumps(state, indent=2) + "\n")
    file.flush()
    os.fsync(file.fileno())
os.replace(path + ".partial", path)
folder = os.open(os.path.dirname(path), os.O_RDONLY)
os.fsync(folder)
PYTHON
}

on_exit() {
    local status=$?
    resume_apt_jobs
    [[ -z $finished ]] || return 0
    say "failed with exit status $status"
    write_state false "$(tail -n 20 "$LOG" | tail -c 4000)"
    printf 'error: node set-up failed at step %s; see %s\n' "$step" "$LOG" >&3
    exit "$EXIT_BOOTSTRAP"
}

# Stopped, not disabled, so that a reboot starts them again even if this script is killed.
pause_apt_jobs() {
    local job
    for job in "${APT_JOBS[@]}"; do
        systemctl is-active --quiet "$job" || continue
        paused+=("$job")
        systemctl stop "$job"
    done
}

resume_apt_jobs() {
    ((${#paused[@]} == 0)) || systemctl start "${paused[@]}" || say "could not start ${paused[*]}"
    paused=()
}

apt_get() {
    DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get -qq --no-install-recommends \
        -o DPkg::Lock::Timeout="$LOCK_TIMEOUT_S" -o Acquire::Retries=3 "$@" 9>&-
}

# apt has no timeout for the lock of the package lists, unlike dpkg's, and NAT can be ready late.
update_lists() {
    local deadline=$((SECONDS + 120))
    until apt_get update --error-on=any; do
        ((SECONDS < deadline)) || fail "apt-get update failed for 120 s; its output is above."
        sleep 5
    done
}

has_package() {
    [[ $(dpkg-query --show --showformat '${Status}' "$1" 2>/dev/null) == "install ok installed" ]]
}

# has_one_of NAME|NAME: a package can have different names on different systems.
has_one_of() {
    local name
    for name in ${1//|/ }; do
        if has_package "$name"; then return; fi
    done
    return 1
}

# Prints the first of the names that is in this system's package lists.
known_of() {
    local name
    for name in ${1//|/ }; do
        if apt-cache show "$name" >/dev/null 2>&1; then break; fi
    done
    printf '%s\n' "$name"
}

step_packages() {
    local names package missing=() chosen=()
    for names in $PACKAGES; do
        has_one_of "$names" || missing+=("$names")
    done
    ((${#missing[@]})) || return 0
    pause_apt_jobs
    update_lists
    for names in "${missing[@]}"; do
        package=$(known_of "$names")
        chosen+=("$package")
    done
    say "installing ${chosen[*]}"
    apt_get install -y "${chosen[@]}"
    resume_apt_jobs
}

step_kernel() { sysctl --quiet --load "$SYSCTL"; }

# Checks sshd's effective settings, because an earlier config file can override ours.
step_sshd() {
    install -d -m 0755 /run/sshd
    sshd -t
    local effective line
    effective=$(sshd -T)
    for line in "passwordauthentication no" "permitrootlogin no" "allowusers $LOGIN_USER"; do
        grep -qxF -- "$line" <<<"$effective" || fail "sshd's settings lack '$line'; check: sshd -T"
    done
    systemctl try-reload-or-restart ssh.service
}

# The OS Login user cannot be resolved until Google's agent runs; logind reads the file later.
enable_linger() {
    loginctl enable-linger "$LOGIN_USER" || install -D -m 0644 /dev/null "/var/lib/systemd/linger/$LOGIN_USER"
}

# Lingering: otherwise logind removes the user's shared memory when the last session closes.
step_user() {
    local home status
    home=$(getent passwd "$NODE_USER" | cut -d: -f6)
    status=$(passwd --status "$NODE_USER" | cut -d' ' -f2)
    [[ $status == L ]] || fail "the password of $NODE_USER is not locked (status $status)."
    chmod 0750 "$home"
    if [[ $LOGIN_USER == "$NODE_USER" ]]; then
        chmod 0700 "$home/.ssh"
        chmod 0600 "$home/.ssh/authorized_keys"
    fi
    [[ -e /var/lib/systemd/linger/$LOGIN_USER ]] || enable_linger
}

# Uses the driver modules that Canonical builds and signs for this kernel, because Secure Boot loads
# no others. https://documentation.ubuntu.com/server/how-to/graphics/install-nvidia-drivers/
# Held, because an upgrade would replace the library that matches the loaded module.
step_driver() {
    [[ -n $NVIDIA_DRIVER ]] || return 0
    local branch=$NVIDIA_DRIVER-server drivers
    drivers=("linux-modules-nvidia-$branch-open-$(uname -r)" "nvidia-headless-no-dkms-$branch-open"
        "nvidia-utils-$branch")
    if ! has_package "${drivers[0]}" || ! has_package "${drivers[2]}"; then
        pause_apt_jobs
        update_lists
        say "installing ${drivers[*]}"
        apt_get install -y "${drivers[@]}" ||
            fail "NVIDIA's driver could not be installed for kernel $(uname -r); apt's output is above."
        resume_apt_jobs
    fi
    apt-mark hold "${drivers[@]}" >/dev/null
    modprobe nvidia || fail "the kernel could not load NVIDIA's module; check: dmesg"
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader ||
        fail "nvidia-smi shows no GPU; check: dmesg"
}

step_payload() {
    # --torch-cuda: there is no user to confirm it, and a node needs torch.
    local options=(--venv "$VENV" --extras "$EXTRAS" --lock "$here/requirements.lock" --torch-cuda)
    [[ -z $NVIDIA_DRIVER ]] || options+=(--torch-gpu)
    [[ -z $WHEELHOUSE ]] || options+=(--wheelhouse "$WHEELHOUSE")
    [[ -z $TORCH_INDEX ]] || options+=(--torch-index "$TORCH_INDEX")
    install -d -o "$NODE_USER" -g "$NODE_USER" -m 0755 "$(dirname "$VENV")"
    (cd / && runuser -u "$NODE_USER" -- env PIP_NO_CACHE_DIR=1 \
        bash "$here/install-payload.sh" "${options[@]}" 9>&-)
}

# Ports of the machine exporters. They are in the kernel's ephemeral range, which the firewall opens
# between nodes, and reserved by sysctl (cloud-init.yaml.j2) so that no connection uses them.
readonly NODE_EXPORTER_PORT=39100 GPU_EXPORTER_PORT=39400
readonly MONITORING_DIR=/etc/tileforge/monitoring

# Prints this node's address in the cluster, or fails.
own_address() {
    local entry here
    here=" $(hostname -I) "
    for entry in $NODES; do
        [[ $here != *" ${entry#*=} "* ]] || {
            printf '%s\n' "${entry#*=}"
            return
        }
    done
    fail "none of this node's addresses ($here) is in NODES."
}

# targets PORT: prints Prometheus's scrape targets on every node, in file_sd's format.
targets() {
    local entry separator=""
    printf '['
    for entry in $NODES; do
        printf '%s{"targets": ["%s:%s"], "labels": {"node": "%s"}}' \
            "$separator" "${entry#*=}" "$1" "${entry%%=*}"
        separator=", "
    done
    printf ']\n'
}

# service NAME UNIT-LINE...: adds settings to a package's service and restarts it.
service() {
    local name=$1
    shift
    install -d -m 0755 "/etc/systemd/system/$name.service.d"
    printf '%s\n' "$@" >"/etc/systemd/system/$name.service.d/tileforge.conf"
    systemctl daemon-reload
    systemctl enable --quiet "$name.service"
    systemctl restart "$name.service"
}

# package NAME[=VERSION]: write its settings first, so that it never starts with the defaults.
package() {
    has_package "${1%%=*}" || apt_get -o Dpkg::Options::=--force-confold install -y "$1"
}

# The machine's metrics, only on its address in the cluster's network.
monitor_machine() {
    local address=$1
    printf 'ARGS="--web.listen-address=%s:%s"\n' "$address" "$NODE_EXPORTER_PORT" \
        >/etc/default/prometheus-node-exporter
    package prometheus-node-exporter
    service prometheus-node-exporter "[Unit]" "After=network-online.target" \
        "Wants=network-online.target" "StartLimitIntervalSec=0" "[Service]" "RestartSec=5"
    [[ -e /proc/driver/nvidia/version ]] || return 0
    # From NVIDIA's repository, which NVIDIA's images configure with its key.
    if ! has_package datacenter-gpu-manager-exporter &&
        ! apt-cache show datacenter-gpu-manager-exporter >/dev/null 2>&1; then
        say "no GPU metrics: package datacenter-gpu-manager-exporter not found"
        return 0
    fi
    package datacenter-gpu-manager-exporter
    service nvidia-dcgm-exporter "[Service]" \
        "Environment=DCGM_EXPORTER_LISTEN=$address:$GPU_EXPORTER_PORT"
}

# Prometheus and Grafana, only on the head's loopback address.
monitor_cluster() {
    install -d -m 0755 "$MONITORING_DIR/targets"
    printf '[{"targets": ["127.0.0.1:9464"]}]\n' >"$MONITORING_DIR/targets/run.json"
    targets "$NODE_EXPORTER_PORT" >"$MONITORING_DIR/targets/machines.json"
    # All nodes have the same machine type.
    if [[ -e /proc/driver/nvidia/version ]]; then
        targets "$GPU_EXPORTER_PORT"
    else
        echo "[]"
    fi >"$MONITORING_DIR/targets/gpus.json"
    printf 'ARGS="%s %s %s %s"\n' "--config.file=$MONITORING_DIR/prometheus.yml" \
        --web.listen-address=127.0.0.1:9090 --storage.tsdb.retention.time=30d \
        --storage.tsdb.retention.size=5GB >/etc/default/prometheus
    package prometheus
    service prometheus "[Service]" "RestartSec=5"
    install_grafana
    service grafana-server "[Service]" "EnvironmentFile=$MONITORING_DIR/grafana.env"
}

# From Grafana's repository, whose index must be signed by the key in user-data.
install_grafana() {
    local list=/etc/apt/sources.list.d/grafana.list
    has_package grafana && return
    printf 'deb [arch=amd64 signed-by=%s] https://apt.grafana.com stable main\n' \
        "$MONITORING_DIR/grafana.asc" >"$list"
    update_lists
    package "grafana=$GRAFANA_VERSION"
}

step_monitoring() {
    [[ $MONITORING == prometheus ]] || return 0
    local address head
    address=$(own_address)
    head=${NODES%% *}
    pause_apt_jobs
    has_package prometheus-node-exporter || update_lists
    monitor_machine "$address"
    [[ $address != "${head#*=}" ]] || monitor_cluster
    resume_apt_jobs
}

# Prints an attribute of this instance from Google's metadata server.
attribute() {
    python3 -I - "$1" <<'PYTHON'
import sys, urllib.request
url = f"http://metadata.google.internal/computeMetadata/v1/instance/attributes/{sys.argv[1]}"
request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
print(urllib.request.urlopen(request, timeout=10).read().decode("ascii").strip())
PYTHON
}

# The folder has the same path on every node. The head exports it from its disk, or mounts it, too.
step_shared() {
    [[ $SHARED != none ]] || return 0
    local address head="${NODES%% *}" source
    address=$(own_address)
    head=${head#*=}
    pause_apt_jobs
    has_package nfs-common || update_lists
    package nfs-common
    if [[ $SHARED == nfs && $address == "$head" ]]; then
        package nfs-kernel-server
        bash "$here/shared-storage.sh" export "$SHARED_CLIENTS"
    else
        source="$head:/"
        if [[ $SHARED == filestore ]]; then source=$(attribute shared-source); fi
        bash "$here/shared-storage.sh" mount "$source"
        # On Filestore only the head has root access.
        [[ $address != "$head" ]] || bash "$here/shared-storage.sh" folders
    fi
    resume_apt_jobs
    # sshd reads this file at each login, so ranks on all nodes share downloads.
    grep -qxF "HF_HOME=$SHARED_DIR/hub" /etc/environment || echo "HF_HOME=$SHARED_DIR/hub" >>/etc/environment
}

run_step() {
    step=$1
    write_state null ""
    say "begins"
    "step_$1"
}

main() {
    ((EUID == 0)) || {
        echo "error: node-setup.sh must run as root." >&2
        exit 2
    }
    install -d -m 0755 "$(dirname "$STATE")"
    exec 9>/run/tileforge-bootstrap.lock
    flock 9
    install -m 0640 /dev/null "$LOG.new"
    mv "$LOG.new" "$LOG"
    exec 3>&1 >>"$LOG" 2>&1 </dev/null
    # shellcheck source=/dev/null # VERSION SHA NODE_USER LOGIN_USER PACKAGES VENV EXTRAS WHEELHOUSE
    # TORCH_INDEX NVIDIA_DRIVER MONITORING NODES GRAFANA_VERSION SHARED SHARED_DIR SHARED_CLIENTS
    . "$CONF"
    trap on_exit EXIT
    local name
    for name in packages kernel sshd user driver payload shared monitoring; do
        run_step "$name"
    done
    step="done"
    say "ready in $SECONDS s"
    write_state true ""
    finished=1
    printf 'node set-up: ready in %s s\n' "$SECONDS" >&3
}

main "$@"
