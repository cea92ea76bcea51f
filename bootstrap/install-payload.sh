#!/usr/bin/env bash
# Makes a virtual environment with exactly the locked requirements. Safe to run twice.
# Needs bash 3.2 or newer, and Python 3.11 or newer with venv. `--help` says more.
set -euo pipefail

readonly EXIT_USAGE=2 EXIT_BOOTSTRAP=30 # payload.errors.ExitCode
readonly STAMP_VERSION=1                # raise it when an old environment must be made anew
readonly CCL_INDEX=https://pytorch-extension.intel.com/release-whl/stable/cpu/us/

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=.venv
extras=train,orchestrate
lock=$here/requirements.lock
wheelhouse=
python=
torch_index=https://download.pytorch.org/whl/cpu

usage() {
    cat <<USAGE
usage: install-payload.sh [--venv DIR] [--extras LIST] [--lock FILE] [--wheelhouse DIR]
                          [--python PYTHON] [--torch-index URL]

Makes a virtual environment with exactly the versions in the lock file. A second run with the
same lock and extras changes nothing and returns at once.

  --venv DIR         where to make it (default: .venv)
  --extras LIST      what it is for, from train, orchestrate, dev, or intel, ccl
                     (default: train,orchestrate); what an environment already has, stays
  --lock FILE        locked requirements (default: requirements.lock beside this script)
  --wheelhouse DIR   take every package from this folder of wheels and open no connection
  --python PYTHON    interpreter to build on (default: python3, then python3.14 ... python3.11)
  --torch-index URL  index of PyTorch's CPU builds, used on Linux when it can be reached
                     (default: https://download.pytorch.org/whl/cpu)

pip's own settings (PIP_INDEX_URL, PIP_CERT, proxies, pip.conf) are honoured.
Exit codes: 0 ready, 2 usage, 30 not ready (the last line says why).
USAGE
}

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit "$EXIT_BOOTSTRAP"
}

usage_error() {
    printf 'error: %s\n' "$*" >&2
    exit "$EXIT_USAGE"
}

parse_arguments() {
    while (($#)); do
        case $1 in
        --help | -h)
            usage
            exit 0
            ;;
        --venv | --extras | --lock | --wheelhouse | --python | --torch-index)
            (($# > 1)) || usage_error "$1 needs a value; --help shows them."
            case $1 in
            --venv) venv=$2 ;;
            --extras) extras=$2 ;;
            --lock) lock=$2 ;;
            --wheelhouse) wheelhouse=$2 ;;
            --python) python=$2 ;;
            --torch-index) torch_index=${2%/} ;;
            esac
            shift 2
            ;;
        *) usage_error "unknown argument '$1'; --help lists what there is." ;;
        esac
    done
    [[ -f $lock ]] || usage_error "lock file '$lock' does not exist; name one with --lock."
    [[ -z $wheelhouse || -d $wheelhouse ]] || usage_error "wheelhouse '$wheelhouse' is no folder."
    local known extra
    known=$(sed -n 's/^[A-Za-z0-9].*  # //p' "$lock" | tr ',' '\n' | tr -d ' ' | sort -u)
    for extra in ${extras//,/ }; do
        grep -qxF -- "$extra" <<<"$known" ||
            usage_error "unknown extra '$extra'. The lock has: $(tr '\n' ' ' <<<"$known")"
    done
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${python:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            python=$candidate
            return
        fi
    done
    local found
    found=$("${python:-python3}" --version 2>&1) || found="no ${python:-python3}"
    fail "Python 3.11 or newer is needed, found: $found. Install it, or name one with --python."
}

# What is installed already: "HASH extra,extra", or nothing.
read_stamp() {
    if [[ -f $venv/.tileforge-setup && -x $venv/bin/python ]]; then cat "$venv/.tileforge-setup"; fi
}

write_stamp() { printf '%s %s\n' "$hash" "$extras" >"$venv/.tileforge-setup"; }

lock_hash() {
    "$python" - "$lock" "$STAMP_VERSION" <<'PYTHON'
import hashlib, pathlib, sys
text = pathlib.Path(sys.argv[1]).read_bytes()
print(hashlib.sha256(text + sys.argv[2].encode()).hexdigest())
PYTHON
}

# Adds the extras that the environment has to `extras`; succeeds when there is nothing to do.
merge_with_installed() {
    local stamp installed wanted=$extras
    stamp=$(read_stamp)
    installed=${stamp#* }
    extras=$(tr ',' '\n' <<<"$wanted,$installed" | sort -u | grep . | paste -sd, -)
    [[ ,$extras, != *,train,* || ,$extras, != *,intel,* ]] ||
        usage_error "the extras train and intel need different versions of torch; give each its own --venv."
    [[ $stamp == "$hash $extras" ]] && "$venv/bin/python" -c '' 2>/dev/null
}

# The lock's lines for the extras; a line's own extras are in the comment at its end.
requirements() {
    awk -v wanted="$extras" '
        BEGIN { split(wanted, list, ","); for (i in list) want[list[i]] = 1 }
        /^[A-Za-z0-9]/ {
            n = split($0, part, "  # "); m = split(part[2], own, ", ")
            for (i = 1; i <= m; i++) if (own[i] in want) { print part[1]; break }
        }' "$lock"
}

# A second set-up of the same environment waits for the first, where flock exists (Linux).
wait_for_others() {
    mkdir -p "$venv" 2>/dev/null || fail "cannot make the folder '$venv'; choose another with --venv."
    command -v flock >/dev/null || return 0
    exec 9>"$venv/.tileforge-setup.lock"
    flock -n 9 || {
        say "another set-up of $venv is running; waiting for it"
        flock 9
    }
}

need_disk_gb() {
    local free_kb
    free_kb=$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')
    ((free_kb >= $1 * 1000000)) ||
        fail "$venv has $((free_kb / 1000000)) GB free and needs $1 GB $2. Free some, or choose another place with --venv."
}

make_venv() {
    [[ -x $venv/bin/python ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    say "making $venv with $("$python" --version)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "this Python has no venv module. On Debian and Ubuntu: apt-get install python3-venv"
    local clear=()
    [[ ! -e $venv/pyvenv.cfg ]] || clear=(--clear) # it was an environment, and works no more
    "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv" || fail "python -m venv $venv failed; what it said is above."
}

# Not compiled: of the 35 s of one core that this takes, what a run imports needs 4.
pip_install() {
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-compile "$@"
}

reachable() {
    "$python" - "$1" <<'PYTHON'
import signal, ssl, sys, urllib.error, urllib.request
signal.alarm(5)  # name look-ups have no timeout of their own; this ends them too
try:
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=4)
except urllib.error.HTTPError as error:
    sys.exit(error.code >= 500)
except urllib.error.URLError as error:
    # pip may have been told of a certificate that this probe does not know.
    sys.exit(not isinstance(error.reason, ssl.SSLError))
except (OSError, ValueError):
    sys.exit(1)
PYTHON
}

# Prints "count gigabytes" for the CUDA packages that `pip install TORCH` would bring, or nothing.
cuda_packages() {
    "$venv/bin/python" - "$1" <<'PYTHON'
import json, pathlib, re, subprocess, sys, urllib.error, urllib.parse, urllib.request
PIP = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input",
       "--dry-run", "--ignore-installed", "--report", "-", sys.argv[1]]

def report(*options):
    done = subprocess.run([*PIP, *options], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)["install"]

def size(url):
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return pathlib.Path(urllib.request.url2pathname(parts.path)).stat().st_size
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=4) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0

def is_cuda(name):
    return re.match(r"(nvidia|cuda)[-_.]|triton", name) is not None

needs = [need for entry in report("--no-deps") for need in entry["metadata"].get("requires_dist", [])]
if any(is_cuda(need) for need in needs):
    wheels = [e for e in report() if is_cuda(e["metadata"]["name"]) or e["metadata"]["name"] == "torch"]
    print(len(wheels), round(sum(size(e["download_info"]["url"]) for e in wheels) / 1e9, 1))
PYTHON
}

install_torch() {
    local torch=$1
    "$venv/bin/python" -m pip freeze --disable-pip-version-check 2>/dev/null |
        grep -qE "^${torch//./\\.}(\+.*)?$" && return
    if [[ -n $wheelhouse ]]; then
        pip_install --no-deps --no-index --find-links "$wheelhouse" "$torch" ||
            fail "the wheelhouse $wheelhouse has no $torch for this Python and machine."
        return
    fi
    if [[ $(uname -s) == Linux ]]; then
        if reachable "$torch_index/torch/"; then
            say "installing $torch, CPU build, from $torch_index"
            pip_install --no-deps --retries 1 --index-url "$torch_index" "$torch" && return
            say "that failed; trying the plain package index"
        else
            say "$torch_index cannot be reached; using the plain package index"
        fi
        announce_cuda "$torch" && return
    fi
    say "installing $torch"
    pip_install --no-deps "$torch" || fail "pip could not install $torch; what it said is above."
}

# Installs torch with its CUDA packages, having said so; fails when torch brings none.
announce_cuda() {
    local torch=$1 found count gigabytes
    found=$(cuda_packages "$torch") || fail "pip found no $torch; what it said is above."
    [[ -n $found ]] || return 1
    read -r count gigabytes <<<"$found"
    [[ $gigabytes != 0.0 ]] || gigabytes="about 3" # the index tells no sizes
    say "NOTE: the plain index has $torch only as a CUDA build: $count packages, $gigabytes GB to"
    say "NOTE: download, about 7 GB on disk, and of no use without an NVIDIA GPU. To avoid it, stop"
    say "NOTE: this now (Ctrl-C) and give the CPU build another way: --torch-index URL for a mirror"
    say "NOTE: of https://download.pytorch.org/whl/cpu, or --wheelhouse DIR."
    [[ ! -t 2 ]] || sleep 10
    need_disk_gb 9 "for the CUDA build of torch"
    say "installing $torch, CUDA build"
    # A constraint may not name a package's extras.
    pip_install --constraint <(requirements | grep -v '^torch==' | sed 's/\[[^]]*\]//') "$torch" ||
        fail "pip could not install $torch; what it said is above."
}

# oneccl_bind_pt is on Intel's own index only. Without it everything but backend = "ccl" works.
install_ccl() {
    local ccl=$1
    if [[ -n $wheelhouse ]]; then
        pip_install --no-deps --no-index --find-links "$wheelhouse" "$ccl" && return
    elif reachable "$CCL_INDEX"; then
        say "installing $ccl from $CCL_INDEX"
        pip_install --no-deps --retries 1 --extra-index-url "$CCL_INDEX" "$ccl" && return
    fi
    say "NOTE: $ccl is not installed: $CCL_INDEX cannot be reached"
    say "NOTE: or has none for this Python. Everything but distributed.backend = \"ccl\" works."
    extras=$(without_ccl)
}

without_ccl() { tr ',' '\n' <<<"$extras" | grep -vx ccl | paste -sd, -; }

# All is there but ccl, which could not be had before: see whether it can be had now.
only_ccl_is_missing() {
    [[ ,$extras, == *,ccl,* && $(read_stamp) == "$hash $(without_ccl)" ]]
}

install_rest() {
    local list=$1 source=()
    [[ -z $wheelhouse ]] || source=(--no-index --find-links "$wheelhouse")
    say "installing $(grep -c . "$list") packages for $extras"
    pip_install --no-deps ${source[@]+"${source[@]}"} --requirement "$list" ||
        fail "pip could not install the packages of $lock; what it said is above."
}

# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process would do it anew.
compile_imports() {
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" - >/dev/null 2>&1 <<'PYTHON' || true
import contextlib, importlib
for name in ("torch", "accelerate", "safetensors.torch", "tiktoken", "paramiko", "rich.progress", "datasets",
             "transformers", "google.cloud.compute_v1", "google.cloud.storage", "pulumi", "pytest"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
PYTHON
}

# An older lock's packages that this one no longer has. torch's CUDA packages are torch's to pin.
remove_strays() {
    local strays
    strays=$("$venv/bin/python" - <(requirements) <<'PYTHON'
import importlib.metadata, pathlib, re, sys
def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()
locked = {plain(re.split(r"[\[=; ]", line)[0]) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()}
there = {plain(found.metadata["Name"]) for found in importlib.metadata.distributions()}
kept = locked | {"pip", "setuptools", "wheel"}
print(*sorted(name for name in there - kept if not re.match(r"(nvidia|cuda)[-_.]|triton", name)))
PYTHON
    )
    [[ -n $strays ]] || return 0
    say "removing what the lock no longer has: $strays"
    # shellcheck disable=SC2086 # names of packages, separated by spaces
    "$venv/bin/python" -m pip uninstall -qq -y --disable-pip-version-check $strays
}

# An environment keeps the Python that it was made with; naming another one must not be ignored.
refuse_other_python() {
    [[ -n $named_python && -x $venv/bin/python ]] || return 0
    local old new
    old=$("$venv/bin/python" --version 2>&1) || return 0 # broken; it is made anew
    new=$("$python" --version)
    [[ $old == "$new" ]] ||
        usage_error "$venv was made with $old, --python names $new. Remove it first (rm -r $venv), or choose another --venv."
}

main() {
    parse_arguments "$@"
    local named_python=$python
    find_python
    refuse_other_python
    hash=$(lock_hash)
    if merge_with_installed; then return; fi
    wait_for_others
    if merge_with_installed; then return; fi
    local began=$SECONDS list torch ccl
    torch=$(requirements | grep -E '^torch==' || true)
    ccl=$(requirements | grep -E '^oneccl_bind_pt==' || true)
    if only_ccl_is_missing; then
        install_ccl "${ccl%% *}"
        write_stamp
        return
    fi
    need_disk_gb 3 "for the environment"
    make_venv
    rm -f "$venv/.tileforge-setup"
    list=$(mktemp)
    # shellcheck disable=SC2064 # the name as it is now
    trap "rm -f '$list'" EXIT
    [[ -z $torch ]] || install_torch "${torch%% *}"
    requirements | grep -vE '^(torch|oneccl_bind_pt)==' >"$list" || true
    [[ ! -s $list ]] || install_rest "$list"
    [[ -z $ccl ]] || install_ccl "${ccl%% *}"
    remove_strays
    "$venv/bin/python" -m pip check --disable-pip-version-check >&2 ||
        fail "the installed packages do not fit together; the lock needs a repair (make lock)."
    compile_imports
    write_stamp
    say "$venv is ready ($((SECONDS - began)) s)"
}

main "$@"
