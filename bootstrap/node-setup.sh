#!/usr/bin/env bash
# Makes a fresh Debian 12 or Ubuntu 24.04 machine ready to train; cloud-init runs it once, as root.
# Safe to run twice. Settings: /etc/tileforge/bootstrap.conf. The state file says how far it came:
# {schema_version, step, ok, reason, version, sha}; ok is null under way, then true or false.
set -euo pipefail

readonly EXIT_BOOTSTRAP=30 # payload.core.errors.ExitCode
readonly CONF=/etc/tileforge/bootstrap.conf
readonly STATE=/var/lib/tileforge/bootstrap.json
readonly LOG=/var/log/tileforge-bootstrap.log
readonly SYSCTL=/etc/sysctl.d/90-tileforge.conf
readonly LOCK_TIMEOUT_S=600 # another apt may be at work: Ubuntu's first boot updates itself
readonly APT_JOBS=(apt-daily.timer apt-daily-upgrade.timer)

export PYTHONSAFEPATH=1 # no modules from the current folder

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
step=start
finished=
paused=()

say() { printf '%s %s: %s\n' "$(date -u +%FT%TZ)" "$step" "$*"; }

# On stderr: own_address and its like are called for what they print.
fail() {
    say "error: $*" >&2
    exit "$EXIT_BOOTSTRAP"
}

# write_state OK REASON: the whole file or none, also when the power goes.
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

# Stopped, not disabled: a reboot brings them back even if this script is killed.
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

# The lock of the package lists, unlike dpkg's, has no timeout in apt, and NAT may come up late.
update_lists() {
    local deadline=$((SECONDS + 120))
    until apt_get update --error-on=any; do
        ((SECONDS < deadline)) || fail "apt-get update failed for 120 s; what it said is above."
        sleep 5
    done
}

has_package() {
    [[ $(dpkg-query --show --showformat '${Status}' "$1" 2>/dev/null) == "install ok installed" ]]
}

# has_one_of NAME|NAME: systems have different names for the same package.
has_one_of() {
    local name
    for name in ${1//|/ }; do
        if has_package "$name"; then return; fi
    done
    return 1
}

# Prints the first of the names that this system's package lists have.
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

# Checks what sshd makes of all its files: another file may have said otherwise first.
step_sshd() {
    install -d -m 0755 /run/sshd
    sshd -t
    local effective line
    effective=$(sshd -T)
    for line in "passwordauthentication no" "permitrootlogin no" "allowusers $LOGIN_USER"; do
        grep -qxF -- "$line" <<<"$effective" || fail "sshd's settings lack '$line'; see sshd -T."
    done
    systemctl try-reload-or-restart ssh.service
}

# OS Login knows its user by name only once Google's agent runs; logind reads the file later.
enable_linger() {
    loginctl enable-linger "$LOGIN_USER" || install -D -m 0644 /dev/null "/var/lib/systemd/linger/$LOGIN_USER"
}

# Lingering: else logind ends the user's shared memory when the operator's last session closes.
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

# The driver's modules are those that Canonical builds and signs for this very kernel: Secure Boot
# loads no others. https://documentation.ubuntu.com/server/how-to/graphics/install-nvidia-drivers/
# Held: an upgrade would take the library from under the module that is loaded.
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
            fail "NVIDIA's driver could not be installed for kernel $(uname -r); what apt said is above."
        resume_apt_jobs
    fi
    apt-mark hold "${drivers[@]}" >/dev/null
    modprobe nvidia || fail "the kernel does not load NVIDIA's module; see dmesg."
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader ||
        fail "nvidia-smi shows no GPU; see dmesg."
}

step_payload() {
    # --torch-cuda: nobody is there to ask, and a node without torch is of no use.
    local options=(--venv "$VENV" --extras "$EXTRAS" --lock "$here/requirements.lock" --torch-cuda)
    [[ -z $NVIDIA_DRIVER ]] || options+=(--torch-gpu)
    [[ -z $WHEELHOUSE ]] || options+=(--wheelhouse "$WHEELHOUSE")
    [[ -z $TORCH_INDEX ]] || options+=(--torch-index "$TORCH_INDEX")
    install -d -o "$NODE_USER" -g "$NODE_USER" -m 0755 "$(dirname "$VENV")"
    (cd / && runuser -u "$NODE_USER" -- env PIP_NO_CACHE_DIR=1 \
        bash "$here/install-payload.sh" "${options[@]}" 9>&-)
}

# Where the machine exporters listen: within the kernel's own range of ports, which the cluster's
# firewall has open between its nodes, and reserved (bootstrap.conf's sysctl) so that nothing takes them.
readonly NODE_EXPORTER_PORT=39100 GPU_EXPORTER_PORT=39400
readonly MONITORING_DIR=/etc/tileforge/monitoring

# Prints this node's own address within the cluster, or fails.
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

# targets PORT: what Prometheus scrapes on every node, as its file_sd reads it.
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

# service NAME UNIT-LINE...: more settings of a package's service, and the service restarted.
service() {
    local name=$1
    shift
    install -d -m 0755 "/etc/systemd/system/$name.service.d"
    printf '%s\n' "$@" >"/etc/systemd/system/$name.service.d/tileforge.conf"
    systemctl daemon-reload
    systemctl enable --quiet "$name.service"
    systemctl restart "$name.service"
}

# package NAME[=VERSION]: its settings were written before, so that it never starts with others.
package() {
    has_package "${1%%=*}" || apt_get -o Dpkg::Options::=--force-confold install -y "$1"
}

# The machine's own metrics, on its address within the cluster's network alone.
monitor_machine() {
    local address=$1
    printf 'ARGS="--web.listen-address=%s:%s"\n' "$address" "$NODE_EXPORTER_PORT" \
        >/etc/default/prometheus-node-exporter
    package prometheus-node-exporter
    service prometheus-node-exporter "[Unit]" "After=network-online.target" \
        "Wants=network-online.target" "StartLimitIntervalSec=0" "[Service]" "RestartSec=5"
    [[ -e /proc/driver/nvidia/version ]] || return 0
    # From NVIDIA's repository, which an image of NVIDIA's has, with its key.
    if ! has_package datacenter-gpu-manager-exporter &&
        ! apt-cache show datacenter-gpu-manager-exporter >/dev/null 2>&1; then
        say "no metrics of the GPUs: no package datacenter-gpu-manager-exporter is known here"
        return 0
    fi
    package datacenter-gpu-manager-exporter
    service nvidia-dcgm-exporter "[Service]" \
        "Environment=DCGM_EXPORTER_LISTEN=$address:$GPU_EXPORTER_PORT"
}

# Prometheus and Grafana, on the head's loopback address alone.
monitor_cluster() {
    install -d -m 0755 "$MONITORING_DIR/targets"
    printf '[{"targets": ["127.0.0.1:9464"]}]\n' >"$MONITORING_DIR/targets/run.json"
    targets "$NODE_EXPORTER_PORT" >"$MONITORING_DIR/targets/machines.json"
    # All nodes are of one machine type.
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

# From Grafana's own repository, whose index has to be signed by the key that came with user-data.
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

# The folder is at the same place everywhere; the head has it on its disk, or mounts it, too.
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
        # Filestore lets the head's root write, and no other's.
        [[ $address != "$head" ]] || bash "$here/shared-storage.sh" folders
    fi
    resume_apt_jobs
    # sshd reads it at each login, so ranks have it: what one node has downloaded all have.
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
        echo "error: node-setup.sh changes the machine and needs root." >&2
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
