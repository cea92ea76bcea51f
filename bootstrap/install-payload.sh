#!/usr/bin/env bash
# Creates a virtual environment with exactly the locked wheels. Idempotent.
# Needs bash 3.2 or newer, and Python 3.11 or newer with venv. Options: --help.
set -euo pipefail
# Python must not import modules from the current folder, which another user can have written, or
# from PYTHONPATH, so that an environment's own packages are listed.
export PYTHONSAFEPATH=1
unset PYTHONPATH

readonly EXIT_USAGE=2 EXIT_BOOTSTRAP=30 # payload.core.errors.ExitCode
readonly STAMP_VERSION=1                # increase it if old environments must be rebuilt
readonly CCL_INDEX=https://pytorch-extension.intel.com/release-whl/stable/cpu/us/

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=.venv
extras=train,orchestrate
lock=$here/requirements.lock
wheelhouse=
download=
get=(install --no-compile)
verb=install
python=
torch_index=https://download.pytorch.org/whl/cpu
cuda=
gpu=
index_found=
from_make=
writable=()
scratch=
ticker=
hush=

usage() {
    cat <<USAGE
usage: install-payload.sh [--venv DIR] [--extras LIST] [--lock FILE] [--wheelhouse DIR]
                          [--download DIR] [--python PYTHON] [--torch-index URL] [--torch-cuda] [--torch-gpu]

Creates a virtual environment with exactly the wheels in the lock file: pip refuses a file whose
SHA-256 is not in the lock. A second run with the same lock and extras returns immediately.

  --venv DIR         the environment's folder (default: .venv)
  --extras LIST      extras to install: train, orchestrate, dev, or intel, ccl
                     (default: train,orchestrate); installed extras are kept
  --lock FILE        locked requirements (default: requirements.lock next to this script)
  --wheelhouse DIR   install every package from this folder of wheels, without a network
  --download DIR     create no environment: download the extras' wheels for this Python and this
                     kind of machine into this folder, for --wheelhouse on another machine
  --python PYTHON    interpreter to use (default: python3, then python3.14 ... python3.11)
  --torch-index URL  index of PyTorch's CPU builds, used on Linux if it can be reached
                     (default: https://download.pytorch.org/whl/cpu)
  --torch-cuda       install torch's CUDA build (about 3 GB) without confirmation if no CPU build
                     is available
  --torch-gpu        install torch's CUDA build even if a CPU build is available, for a machine
                     with an NVIDIA GPU
  --writable DIR     also check that this folder, if it exists, is writable; can be repeated
  --from-make        show make's variables in messages instead of these options

pip's settings (PIP_INDEX_URL, PIP_CERT, proxies, pip.conf) apply.
Exit codes: 0 ready, 2 usage, 30 not ready (the last line has the reason).
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

# Prints an option in the user's syntax: --torch-index URL, or TORCH_INDEX=URL for make.
option() {
    local value=${2-}
    [[ -z $from_make || $1 != download ]] || set -- wheelhouse
    if [[ -z $from_make ]]; then
        printf -- '--%s' "$1${value:+ $value}"
    else
        printf '%s=%s' "$(tr 'a-z-' 'A-Z_' <<<"$1")" "${value:-1}"
    fi
}

interrupted() {
    stop_ticker
    say "interrupted; run the same command again to resume"
    exit "$1"
}

on_exit() {
    stop_ticker
    [[ -z $scratch ]] || rm -rf "$scratch"
}

# working WHAT COMMAND...: shows the elapsed time, in one line on a terminal, otherwise every 15 s.
working() {
    local status=0
    tick "$1" 9>&- &
    ticker=$!
    shift
    "$@" || status=$?
    stop_ticker
    return "$status"
}

tick() {
    local began=$SECONDS
    while sleep 1 && kill -0 $$ 2>/dev/null; do
        if [[ -t 2 ]]; then
            printf '\rsetup: %s: %d s' "$1" "$((SECONDS - began))" >&2
        elif (((SECONDS - began) % 15 == 0)); then
            say "$1: $((SECONDS - began)) s"
        fi
    done
}

stop_ticker() {
    [[ -n $ticker ]] || return 0
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
}

# Runs a command with its output in $scratch/output, which is only shown if it fails.
quietly() { "$@" >"$scratch/output" 2>&1; }

parse_arguments() {
    while (($#)); do
        case $1 in
        --help | -h)
            usage
            exit 0
            ;;
        --torch-cuda | --torch-gpu | --from-make)
            case $1 in
            --torch-cuda) cuda=yes ;;
            --torch-gpu) gpu=yes ;;
            --from-make) from_make=yes ;;
            esac
            shift
            ;;
        --venv | --extras | --lock | --wheelhouse | --download | --python | --torch-index | --writable)
            (($# > 1)) || usage_error "$1 needs a value; see --help."
            case $1 in
            --venv) venv=$2 ;;
            --extras) extras=$2 ;;
            --lock) lock=$2 ;;
            --wheelhouse) wheelhouse=$2 ;;
            --download) download=$2 ;;
            --python) python=$2 ;;
            --torch-index) torch_index=${2%/} ;;
            --writable) writable+=("$2") ;;
            esac
            shift 2
            ;;
        *) usage_error "unknown argument '$1'; see --help." ;;
        esac
    done
    [[ -f $lock ]] || usage_error "lock file '$lock' does not exist; set another one with --lock."
    [[ -z $wheelhouse || -d $wheelhouse ]] || usage_error "wheelhouse '$wheelhouse' is not a folder."
    [[ -z $wheelhouse || -z $download ]] || usage_error "--wheelhouse and --download exclude each other."
    local known extra
    known=$(sed -n 's/^[A-Za-z0-9].*  # //p' "$lock" | tr ',' '\n' | tr -d ' ' | grep -v -e -cuda | sort -u)
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
    fail "Python 3.11 or newer is required, found: $found. Install it, or use: $(option python PYTHON)"
}

# Prints the installed state as "HASH extra,extra", or nothing.
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

# Adds the installed extras to `extras`; succeeds if the environment is up to date.
merge_with_installed() {
    local stamp installed requested=$extras
    stamp=$(read_stamp)
    installed=${stamp#* }
    extras=$(tr ',' '\n' <<<"$requested,$installed" | sort -u | grep . | paste -sd, -)
    [[ ,$extras, != *,train,* || ,$extras, != *,intel,* ]] ||
        usage_error "the extras train and intel need different versions of torch; use a separate --venv for each."
    [[ $stamp == "$hash $extras" ]] && "$venv/bin/python" -c '' 2>/dev/null
}

# Prints the lock's entries for some extras, each with its hashes on one line, in pip's format.
entries() {
    awk -v wanted="$1" '
        function flush() { if (entry != "") print entry; entry = "" }
        BEGIN { split(wanted, list, ","); for (i in list) want[list[i]] = 1 }
        /^[A-Za-z0-9]/ {
            flush(); split($0, part, "  # "); m = split(part[2], own, ", ")
            for (i = 1; i <= m; i++) if (own[i] in want) { entry = part[1]; break }
        }
        /^ +--hash=/ { if (entry != "") entry = entry " " $1 }
        END { flush() }' "$lock"
}

# Refuses folders with files of another user, for example root after a set-up with sudo. The user's
# own read-only files are accepted.
refuse_foreign_files() {
    local folder path foreign=()
    for folder in "$@"; do
        for path in "$folder" "$folder"/* "$folder"/.tileforge-setup*; do
            [[ ! -e $path || -w $path || -O $path ]] || {
                foreign+=("$folder")
                break
            }
        done
    done
    ((${#foreign[@]} == 0)) ||
        fail "${foreign[*]}: not writable for $(id -un), because another user created it (with sudo?). Change the owner: sudo chown -R $(id -un) ${foreign[*]}"
}

# A second set-up of the same environment waits for the first, if flock exists (Linux).
wait_for_others() {
    mkdir -p "$venv" 2>/dev/null || fail "cannot create the folder '$venv'. Use another: $(option venv DIR)"
    command -v flock >/dev/null || return 0
    exec 9>"$venv/.tileforge-setup.lock"
    flock -n 9 || {
        say "another set-up of $venv is running; waiting for it"
        flock 9
    }
}

need_disk_gb() {
    local free_kb folder=${download:-$venv} other
    other=$(option venv DIR)
    [[ -z $download ]] || other=$(option download DIR)
    free_kb=$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')
    ((free_kb >= $1 * 1000000)) ||
        fail "$folder has $((free_kb / 1000000)) GB free, but needs $1 GB $2. Free some space, or use another folder: $other"
}

make_venv() {
    [[ -x $venv/bin/python ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    if [[ -n $download ]] && "$python" -m pip --version >/dev/null 2>&1; then
        mkdir -p "$venv/bin"
        printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v "$python")" >"$venv/bin/python"
        chmod +x "$venv/bin/python"
        return
    fi
    [[ -n $download ]] || say "creating $venv with $("$python" --version)"
    quietly "$python" -c 'import ensurepip, venv' ||
        fail "this Python has no venv module. On Debian and Ubuntu: apt-get install python3-venv"
    local clear=()
    [[ ! -e $venv/pyvenv.cfg ]] || clear=(--clear) # a broken environment
    working "creating $venv" quietly "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv" ||
        fail "python -m venv $venv failed: $(tail -n 3 "$scratch/output")"
}

# pip_get WHAT ENTRIES OPTION...: installs or downloads exactly the lock's entries in a file. No
# source is built, because a build would install packages without pinned hashes. No bytecode is
# compiled: that takes 35 s of one core, while the modules that a run imports need 4 s.
pip_get() {
    local what=$1 list=$2
    shift 2
    working "$what" quietly "$venv/bin/python" -m pip "${get[@]}" -qq --disable-pip-version-check \
        --no-input --no-deps --only-binary=:all: --require-hashes --requirement "$list" "$@" && return
    [[ -n $hush ]] || cat "$scratch/output" >&2
    return 1
}

# missing_wheels FOLDER: prints the packages of the extras of which the folder has no wheel for this
# Python, except those that the environment has. One build of torch is enough.
missing_wheels() {
    entries "$extras" | grep -v '^oneccl_bind_pt==' >"$scratch/wanted" || true
    "$venv/bin/python" - "$scratch/wanted" "$1" "$download" <<'PYTHON'
import importlib.metadata, pathlib, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
tags = set(sys_tags())
there = {(canonicalize_name(each.metadata["Name"]), each.version)
         for each in importlib.metadata.distributions() if not sys.argv[3]}
for path in pathlib.Path(sys.argv[2]).glob("*.whl"):
    try:
        name, version, _, own = parse_wheel_filename(path.name)
    except (InvalidWheelFilename, ValueError):
        continue
    if tags & own:
        there.add((name, str(version)))
wanted = {}
for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
    pin = Requirement(line.partition(" --hash")[0])
    if pin.marker is None or pin.marker.evaluate():
        wanted.setdefault(canonicalize_name(pin.name), []).extend(each.version for each in pin.specifier)
for name, versions in wanted.items():
    if not any((name, version) in there for version in versions):
        print(f"{name}=={versions[0]}")
PYTHON
}

# Prints what wheels must fit, for example: Python 3.11 on Linux x86_64.
this_kind() {
    printf '%s on %s' "$("$venv/bin/python" --version | cut -d. -f1,2)" "$(uname -sm)"
}

# fail_get WHAT: ends with the names of the missing packages, where they are known.
fail_get() {
    local missing shown command="bash bootstrap/install-payload.sh --extras $extras --download DIR"
    [[ -z $wheelhouse ]] || ! missing=$(missing_wheels "$wheelhouse") || [[ -z $missing ]] || {
        [[ -z $from_make ]] || command="make wheels"
        shown=$(head -n 5 <<<"$missing" | paste -sd, - | sed 's/,/, /g')
        (($(wc -l <<<"$missing") <= 5)) || shown+=" and $(($(wc -l <<<"$missing") - 5)) more"
        fail "$wheelhouse has no wheels for $(this_kind) of: $shown. Download them on such a machine with internet: $command"
    }
    missing=$(grep -o 'No matching distribution found for [^ ]*' "$scratch/output" | tail -n 1) || true
    fail "pip could not $verb ${missing:+${missing##* }, one of }$1; its output is above."
}

reachable() {
    "$python" - "$1" <<'PYTHON'
import signal, ssl, sys, urllib.error, urllib.request
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.alarm(5)  # name look-ups have no timeout; this ends them, too
try:
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=4)
except urllib.error.HTTPError as error:
    sys.exit(error.code >= 500)
except urllib.error.URLError as error:
    # pip can be configured with a certificate that this probe does not have.
    sys.exit(not isinstance(error.reason, ssl.SSLError))
except (OSError, ValueError):
    sys.exit(1)
PYTHON
}

# cuda_packages TORCH ALL OPTION...: prints "count gigabytes" of a CUDA build's packages, or nothing.
cuda_packages() {
    "${finder:-$venv/bin/python}" - "$@" <<'PYTHON'
import json, pathlib, re, signal, subprocess, sys, urllib.error, urllib.parse, urllib.request
signal.signal(signal.SIGINT, signal.SIG_DFL)
PIP = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input",
       "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--require-hashes",
       *sys.argv[3:]]

def report(requirements):
    command = [*PIP, "--report", "-", "--requirement", requirements]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
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

(torch,) = report(sys.argv[1])
needs = torch["metadata"].get("requires_dist", [])
if any(re.match(r"(nvidia|cuda)[-_.]|triton", need) for need in needs):
    wheels = report(sys.argv[2])
    print(len(wheels), round(sum(size(each["download_info"]["url"]) for each in wheels) / 1e9, 1))
PYTHON
}

# look_first TORCH: looks for PyTorch's index before the environment is made, as that can take a
# minute. If the index cannot be reached, looks for a CPU build on pip's index, and prompts if pip's
# index has only the CUDA build. If this Python has no pip, the environment's pip looks later.
look_first() {
    local torch=$1 cpu=$scratch/look-cpu any=$scratch/look found
    local finder=$python
    entries "$extras" | grep -F "$torch+cpu " >"$cpu" || true
    entries "$extras" | grep -E "^$torch( |$)" >"$any" || true
    [[ -z $gpu && -z $wheelhouse && $(uname -s) == Linux && -s $cpu ]] || return 0
    if reachable "$torch_index/torch/" 2>/dev/null; then # without "Alarm clock"
        index_found=yes
        return
    fi
    say "$torch_index cannot be reached; using the default package index"
    [[ -z $cuda && ! -x $venv/bin/python ]] || return 0
    quietly "$python" -m pip install -qq --disable-pip-version-check --no-input --dry-run \
        --ignore-installed --no-deps --only-binary=:all: --require-hashes --requirement "$cpu" &&
        return
    found=$(with_cuda_packages "$torch" "$any" 2>/dev/null) || return 0
    [[ -z $found ]] || announce_cuda "$torch" "$found"
}

# The lock has torch==V for the default index and V+cpu for PyTorch's. A CPU build from any source is
# preferred, unless --torch-gpu requests the default index's CUDA build. pip alone would prefer an
# index that lists hashes.
install_torch() {
    local torch=$1 cpu=$scratch/torch-cpu any=$scratch/torch source=() found
    [[ -z $download ]] && "$venv/bin/python" -m pip freeze --disable-pip-version-check 2>/dev/null |
        grep -qE "^${torch//./\\.}(\+.*)?$" && return
    entries "$extras" | grep -F "$torch+cpu " >"$cpu" || true
    entries "$extras" | grep -E "^$torch( |$)" >"$any" || true
    [[ -z $wheelhouse ]] || source=(--no-index --find-links "$wheelhouse")
    if [[ -z $gpu && $(uname -s) == Linux && -s $cpu ]]; then
        if [[ -n $index_found ]]; then
            say "${verb}ing $torch, CPU build, from $torch_index"
            pip_get "${verb}ing $torch" "$cpu" --retries 1 --index-url "$torch_index" && return
            say "that failed; trying pip's configured index"
        fi
        hush=yes pip_get "finding its CPU build" "$cpu" ${source[@]+"${source[@]}"} && return
        ! grep -q "DO NOT MATCH" "$scratch/output" || fail "$(cat "$scratch/output")"
    fi
    found=$(with_cuda_packages "$torch" "$any" ${source[@]+"${source[@]}"}) || exit
    [[ -z $gpu && (-z $found || -z $wheelhouse) ]] || need_disk_gb 9 "for the CUDA build of torch"
    [[ -z $found || -n $wheelhouse || -n $gpu ]] || announce_cuda "$torch" "$found"
    say "${verb}ing $torch${found:+, CUDA build}"
    pip_get "${verb}ing $torch" "$any" ${source[@]+"${source[@]}"} ||
        fail_get "the packages of $torch"
}

# with_cuda_packages TORCH ENTRIES OPTION...: if this source has a CUDA build, adds its packages to
# the entries and prints "count gigabytes".
with_cuda_packages() {
    local torch=$1 any=$2 group=train found
    shift 2
    [[ ,$extras, != *,intel,* ]] || group=intel
    { cat "$any" && entries "$group-cuda"; } >"$any-cuda"
    : >"$scratch/output" # of the earlier attempt
    found=$(cuda_packages "$any" "$any-cuda" "$@") ||
        fail_get "the packages of $torch"
    [[ -z $found ]] || mv "$any-cuda" "$any"
    printf '%s' "$found"
}

# Describes the CUDA build and requires the user's confirmation.
announce_cuda() {
    local torch=$1 count gigabytes
    read -r count gigabytes <<<"$2"
    [[ $gigabytes != 0.0 ]] || gigabytes="about 3" # the index lists no sizes
    say "NOTE: the default index has $torch only as a CUDA build: $count packages, $gigabytes GB to"
    say "NOTE: download, about 7 GB on disk, useful only with an NVIDIA GPU. For the CPU build, use"
    say "NOTE: a mirror of https://download.pytorch.org/whl/cpu ($(option torch-index URL))"
    say "NOTE: or a folder of wheels ($(option wheelhouse DIR))."
    agree_to_cuda
    need_disk_gb 9 "for the CUDA build of torch"
}

agree_to_cuda() {
    [[ -z $cuda ]] || return 0
    [[ -t 0 && -t 2 ]] ||
        fail "the CUDA build of torch needs your confirmation: $(option torch-cuda)"
    local answer
    read -r -p "setup: install the CUDA build? [y/N] " answer || answer=
    [[ $answer == [yY]* ]] || fail "the CUDA build of torch was declined; nothing was downloaded."
    cuda=yes
}

# oneccl_bind_pt is only on Intel's index, and the lock has no hash for it, so pip must use no other
# index. Without oneccl_bind_pt, everything except backend = "ccl" works.
install_ccl() {
    local ccl=$1 source=(--index-url "$CCL_INDEX" --retries 1)
    [[ -z $wheelhouse ]] || source=(--no-index --find-links "$wheelhouse")
    if [[ -n $wheelhouse ]] || reachable "$CCL_INDEX" 2>/dev/null; then
        say "${verb}ing $ccl"
        # The variable overrides more indexes in pip.conf.
        PIP_EXTRA_INDEX_URL=$CCL_INDEX working "${verb}ing $ccl" "$venv/bin/python" -m pip "${get[@]}" \
            -qq --disable-pip-version-check --no-input --no-deps --only-binary=:all: \
            "${source[@]}" "$ccl" && return
    fi
    say "NOTE: $ccl is not ${verb}ed: $CCL_INDEX cannot be reached"
    say "NOTE: or has no build for this Python. Only distributed.backend = \"ccl\" needs it."
    extras=$(without_ccl)
}

without_ccl() { tr ',' '\n' <<<"$extras" | grep -vx ccl | paste -sd, -; }

# Succeeds if only ccl is missing, which an earlier set-up could not download.
only_ccl_is_missing() {
    [[ ,$extras, == *,ccl,* && $(read_stamp) == "$hash $(without_ccl)" ]]
}

install_rest() {
    local list=$1 source=()
    [[ -z $wheelhouse ]] || source=(--no-index --find-links "$wheelhouse")
    local what
    what="${verb}ing the packages for $extras"
    say "$what"
    pip_get "$what" "$list" ${source[@]+"${source[@]}"} ||
        fail_get "the packages of $lock"
}

# Ignores PYTHONDONTWRITEBYTECODE, which many containers set: every process would compile again.
compile_imports() {
    quietly env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" - <<'PYTHON' || true
import contextlib, importlib
for name in ("torch", "accelerate", "safetensors.torch", "tiktoken", "paramiko", "rich.progress", "datasets",
             "transformers", "google.cloud.compute_v1", "google.cloud.storage", "pulumi", "pytest"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
PYTHON
}

# Removes packages of an older lock that the current lock does not have.
remove_strays() {
    local strays
    strays=$("$venv/bin/python" - <(entries "$extras,train-cuda,intel-cuda") <<'PYTHON'
import importlib.metadata, pathlib, re, sys
def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()
locked = {plain(re.split(r"[\[=; ]", line)[0]) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()}
there = {plain(found.metadata["Name"]) for found in importlib.metadata.distributions()}
kept = locked | {"pip", "setuptools", "wheel"}
print(*sorted(there - kept))
PYTHON
    )
    [[ -n $strays ]] || return 0
    say "removing packages that are not in the lock: $strays"
    # shellcheck disable=SC2086 # names of packages, separated by spaces
    "$venv/bin/python" -m pip uninstall -qq -y --disable-pip-version-check $strays
}

# An environment keeps its Python version, so a request for another version must fail.
refuse_other_python() {
    [[ -n $named_python && -x $venv/bin/python ]] || return 0
    local old new
    old=$("$venv/bin/python" --version 2>&1) || return 0 # broken; it is rebuilt
    new=$("$python" --version)
    [[ $old == "$new" ]] ||
        usage_error "$venv has $old, but $(option python "$named_python") is $new. Remove it first (rm -r $venv), or use another folder: $(option venv DIR)"
}

# Redirects pip to a folder. If the chosen Python has no pip, a temporary environment provides pip.
prepare_download() {
    mkdir -p "$download" 2>/dev/null ||
        fail "cannot create the folder '$download'. Use another: $(option download DIR)"
    get=(download --dest "$download")
    verb=download
    venv=$scratch/venv
}

# Checks that the folder is sufficient for a set-up, and prints its size and the next command.
report_download() {
    local missing next="bash bootstrap/install-payload.sh --extras $extras --wheelhouse $download"
    missing=$(missing_wheels "$download" | paste -sd, - | sed 's/,/, /g')
    [[ -z $missing ]] || fail "$download is incomplete; it lacks: $missing. Run the same command again."
    [[ -z $from_make ]] || next="make setup WHEELHOUSE=$(printf %q "$download")"
    say "$download is complete: $(find "$download" -name '*.whl' | wc -l | tr -d ' ') wheels, $(du -sh "$download" | cut -f1), for $(this_kind)"
    say "next, on the machine without internet: $next"
}

main() {
    parse_arguments "$@"
    trap on_exit EXIT
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM
    local named_python=$python
    find_python
    [[ -n $download ]] || refuse_other_python
    refuse_foreign_files ${writable[@]+"${writable[@]}"}
    scratch=$(mktemp -d)
    [[ -z $download ]] || prepare_download
    hash=$(lock_hash)
    if merge_with_installed; then return; fi
    refuse_foreign_files "$venv"
    wait_for_others
    if merge_with_installed; then return; fi
    local began=$SECONDS list=$scratch/rest torch ccl
    torch=$(entries "$extras" | grep -oE '^torch==[^ +]+' | sort -u || true)
    ccl=$(entries "$extras" | grep -oE '^oneccl_bind_pt==[^ ]+' || true)
    if only_ccl_is_missing; then
        install_ccl "$ccl"
        write_stamp
        return
    fi
    need_disk_gb 3 "for ${download:+the wheels of }the environment"
    [[ -z $torch ]] || look_first "$torch"
    make_venv
    rm -f "$venv/.tileforge-setup"
    [[ -z $torch ]] || install_torch "$torch"
    entries "$extras" | grep -vE '^(torch|oneccl_bind_pt)==' >"$list" || true
    [[ ! -s $list ]] || install_rest "$list"
    [[ -z $ccl ]] || install_ccl "$ccl"
    if [[ -n $download ]]; then
        report_download
        return
    fi
    remove_strays
    quietly "$venv/bin/python" -m pip check --disable-pip-version-check ||
        fail "the installed packages are incompatible, so the lock must be updated (make lock): $(tail -n 3 "$scratch/output")"
    working "compiling imported modules" compile_imports
    write_stamp
    say "$venv is ready ($((SECONDS - began)) s)"
}

main "$@"
