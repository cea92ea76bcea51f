"""CONTRACT: a machine's NVIDIA GPUs, as nvidia-smi prints them, and the faults that they show.

Sources: https://docs.nvidia.com/deploy/nvidia-smi (columns and output),
https://docs.nvidia.com/cuda/cuda-programming-guide, "CUDA Environment Variables" (which GPUs
CUDA_VISIBLE_DEVICES leaves), https://docs.nvidia.com/deploy/nvml-api, nvmlReturn_t (exit statuses).
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError
from payload.core.printable_text import one_line, printable, shown
from payload.core.validation.fields import checked
from payload.machines.gpu_catalog import NVIDIA_DRIVER_BRANCH, least_driver_branch
from payload.machines.inventory import CAPABILITY, Node

QUERY = (
    *("index", "uuid", "memory.total", "driver_version", "compute_cap", "mig.mode.current"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "name"),
)
"""Columns that nvidia-smi is asked for. The name comes last, as it may have commas."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_VISIBLE_CHARS = 4096
"""Most of CUDA_VISIBLE_DEVICES that is read; 100 GPUs by their UUIDs are no more."""
MOST_CHARS = 2**16
"""Most text of nvidia-smi's that is read; a GPU's row has about 150 characters."""

_MEMORY_SHARE = 0.9
"""Firmware keeps some: an L4 of 24 GB shows 23,034 MiB."""
_NUMBER = re.compile(r"[0-9]{1,15}")
_DRIVER = re.compile(r"([0-9]{1,4})(?:\.[0-9]{1,6}){1,3}")
_PRINTABLE = re.compile(r"[ -~]+")
_LOG = "See the kernel's log there (`dmesg | grep -i nvrm`)"

# Exit statuses are nvmlReturn_t's; 18 is NVML_ERROR_LIB_RM_VERSION_MISMATCH.
_FIXES = {
    6: f"{_LOG}; a GPU that has fallen off the bus needs a reboot.",
    9: "Load its module: `sudo modprobe nvidia`. Secure Boot loads only a signed one.",
    15: "Reboot the node; if it happens again, replace it.",
    16: "Reset the GPU (`sudo nvidia-smi --gpu-reset`), or reboot the node.",
    18: "Reboot the node, so that the loaded kernel module matches the installed driver.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiOutput:
    """Output of nvidia-smi for QUERY."""

    status: int | None
    """None where it did not end in time."""
    said: str = checked(max_chars=MOST_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The torch that ranks load, by its version.py."""

    version: str = checked(pattern=_PRINTABLE, wanted="printable ASCII", max_chars=64)
    cuda: str | None = checked(None, pattern=_PRINTABLE, wanted="such as 13.0", max_chars=64)
    """None: a build without CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaFacts:
    """A machine's answer about its GPUs."""

    smi: SmiOutput | None
    """None: there is no nvidia-smi on PATH."""
    visible: str | None = checked(None, max_chars=MOST_VISIBLE_CHARS)
    """The beginning of CUDA_VISIBLE_DEVICES; None where it is not set."""
    torch: TorchBuild | None = None
    """None where it is not known."""

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return every GPU, visible or not."""
        done = self.smi is not None and self.smi.status == 0
        rows = self.smi.said.splitlines() if done and self.smi is not None else []
        found: dict[str, GpuDevice] = {}
        for gpu in filter(None, map(_parse, rows)):
            found.setdefault(gpu.uuid, gpu)
        return tuple(found.values())

    def visible_devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that a program started there sees, in its order."""
        return visible_gpus(self.devices(), self.visible)

    def usable_devices(self) -> tuple[GpuDevice, ...]:
        """Return the visible GPUs that the torch there computes on; none with a CPU build."""
        seen = self.visible_devices()
        if not seen or self.torch is None or self.torch.cuda is None:
            return ()
        refused = any(fault.severity == "error" for fault in _driver_faults(self))
        return () if refused else seen

    def describe(self) -> str:
        """Return the GPUs in words, with the driver and the rest that a reader asks for."""
        every, seen = self.devices(), self.visible_devices()
        if not every:
            return "no GPU"
        kinds = list(dict.fromkeys((gpu.name, gpu.memory_mib) for gpu in every))
        counts = [sum((gpu.name, gpu.memory_mib) == kind for gpu in every) for kind in kinds]
        words = [
            f"{count} x {name}" + (f" ({mib / 1024:.1f} GiB)" if mib else "")
            for count, (name, mib) in zip(counts, kinds, strict=True)
        ]
        modes = [f"driver {every[0].driver}"]
        modes += [f"ECC {_all_or_some(on)}" for on in [[gpu.ecc for gpu in every]] if any(on)]
        modes += [f"MIG {_all_or_some(on)}" for on in [[gpu.mig for gpu in every]] if any(on)]
        if self.torch is not None:
            cuda = f"CUDA {self.torch.cuda}" if self.torch.cuda else "no CUDA"
            modes.append(f"torch {self.torch.version} with {cuda}")
        if self.visible is not None:
            modes.append(f"{VISIBLE} = {shown(self.visible)} leaves {len(seen)} of {len(every)}")
        return ", ".join([*words, *modes])


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One row of nvidia-smi's."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    driver: str
    capability: str | None
    mig: bool
    """True: MIG is on, and a program sees only one instance."""
    ecc: bool
    ecc_errors: int
    """Errors of its memory that were not corrected, since the driver was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong with a machine's GPUs."""

    severity: Literal["error", "warning"]
    cause: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """The GPUs that ranks take on each node."""

    why: str
    """The setting or the inventory, as a sentence's subject."""
    ranks_per_node: int | None
    """Ranks that are placed on each node; None: as many as the node has GPUs."""

    def on(self, node: Node) -> int:
        """Return how many ranks require a GPU on this node."""
        return self.ranks_per_node or node.gpus or 1


def gpu_need(config: RunConfig, nodes: Sequence[Node]) -> GpuNeed | None:
    """Return what a run needs of the nodes' GPUs; None where its ranks compute on CPUs.

    `Chosen.gpu_need` adds how many ranks are placed on each node.
    """
    device, ranks_per_node = config.device.kind, config.launch.ranks_per_node
    if device == "cuda":
        why = "device.kind = 'cuda'"
    elif config.distributed.backend == "nccl":
        why = "distributed.backend = 'nccl'"
    elif device == "auto" and nodes and all(node.gpus >= (ranks_per_node or 1) for node in nodes):
        why = "the inventory"
    else:
        return None
    return GpuNeed(why=why, ranks_per_node=ranks_per_node)


def for_prediction(config: RunConfig, nodes: Sequence[Node]) -> RunConfig:
    """Return the config with the device that `device.kind = "auto"` will take on these nodes."""
    if gpu_need(config, nodes) is None:
        return config
    return replace(config, device=replace(config.device, kind="cuda"))


GPU_GUESS = "the predicted step assumes an MFU on GPUs that no run has confirmed"
"""Note of a plan whose step's time is predicted on GPUs."""


def with_gpus(node: Node, facts: NvidiaFacts) -> Node:
    """Return the node with the GPUs that ranks can take there, by the least of them."""
    found = facts.usable_devices()
    sizes = [gpu.memory_mib for gpu in found if gpu.memory_mib]
    capabilities = [gpu.capability for gpu in found if gpu.capability]
    return replace(
        node,
        gpus=len(found),
        gpu_memory_gib=round(min(sizes) / 1024, 2) if sizes else None,
        gpu_capability=min(capabilities, key=_numbers) if capabilities else None,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def torch_here() -> tuple[str, str]:
    """Return where this Python's torch has its version.py: a folder, and the path below it."""
    found = importlib.util.find_spec("torch")
    folder = Path(found.origin).parent if found is not None and found.origin else Path(sys.prefix)
    return str(folder), "version.py"


def require_gpus(facts: NvidiaFacts, *, need: GpuNeed, node: Node) -> None:
    """Raise ConfigError, with what to do, where this machine's GPUs are not fit for a run here."""
    for fault in gpu_faults(facts, need=need, node=node):
        if fault.severity == "error":
            raise ConfigError(f"{need.why}: this machine: {fault.cause}. {fault.fix}")


def gpu_faults(
    facts: NvidiaFacts, *, need: GpuNeed, node: Node, has_device: bool | None = None
) -> Iterator[Fault]:
    """Yield what keeps the GPUs from `need`, or should be known of them.

    `has_device` says whether the machine has the device file of a GPU, where that is known.
    """
    smi, failed = facts.smi, smi_fault(facts)
    if smi is None:
        yield from _absent_smi(facts, need=need, has_device=has_device)
    elif failed is not None:
        yield failed
    else:
        yield from _visible_faults(facts)
        yield from _count_faults(facts, need=need, node=node)
        yield from _driver_faults(facts)
        for gpu in facts.visible_devices():
            yield from _device_faults(gpu, node=node)
        for line in smi.said.splitlines():
            if line.strip() and _parse(line) is None:
                yield _warning(f"nvidia-smi prints: {_words(line)}", f"{_LOG}.")


def smi_fault(facts: NvidiaFacts) -> Fault | None:
    """Return why this nvidia-smi shows no GPU; None where it shows some, or is not there."""
    smi = facts.smi
    if smi is None or facts.devices():
        return None
    if smi.status is None:
        return _error("nvidia-smi does not respond", f"{_LOG}, and reboot the node.")
    if smi.status != 0:
        cause = f"nvidia-smi fails with status {smi.status}: {_words(smi.said)}"
        return _error(cause, _FIXES.get(smi.status, f"{_install()}."))
    return _error(f"nvidia-smi shows no GPU: {_words(smi.said)}", f"{_LOG}.")


def _absent_smi(facts: NvidiaFacts, *, need: GpuNeed, has_device: bool | None) -> Iterator[Fault]:
    """Yield the fault of a machine without nvidia-smi, as some containers are."""
    if has_device:
        return
    cause = f"it has no nvidia-smi, but {need.why} requires GPUs"
    if has_device is None and facts.torch is not None and facts.torch.cuda is not None:
        yield _warning(cause, "The trial tells whether its torch, a CUDA build, has a GPU there.")
    else:
        yield _error(cause, f"{_install()}, or set device.kind = 'cpu'.")


def visible_gpus(every: Sequence[GpuDevice], visible: str | None) -> tuple[GpuDevice, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Each entry is an index or the beginning of one GPU's UUID; the first that is neither ends the
    list, and an entry that comes twice leaves none. A MIG instance counts, without its GPU's facts.
    """
    if visible is None:
        return tuple(every)
    found: list[GpuDevice] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-") and any(gpu.mig for gpu in every):
            owner = next(gpu for gpu in every if gpu.mig)
            named = [_instance(owner, entry)]
        elif _NUMBER.fullmatch(entry):
            named = [gpu for gpu in every if gpu.index == int(entry)]
        else:
            named = [gpu for gpu in every if entry and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        found += named
    return tuple(found) if len({gpu.uuid for gpu in found}) == len(found) else ()


def _instance(owner: GpuDevice, uuid: str) -> GpuDevice:
    name = f"{owner.name} MIG instance"
    return replace(owner, uuid=uuid, name=name, memory_mib=None, mig=False)


def _visible_faults(facts: NvidiaFacts) -> Iterator[Fault]:
    if facts.visible is not None and len(facts.visible) >= MOST_VISIBLE_CHARS:
        cause = f"only the first {MOST_VISIBLE_CHARS:,} characters of {VISIBLE} were read"
        yield _warning(cause, "Shorten it there, for example to the GPUs' indexes.")


def _count_faults(facts: NvidiaFacts, *, need: GpuNeed, node: Node) -> Iterator[Fault]:
    every, seen, wanted = facts.devices(), facts.visible_devices(), need.on(node)
    if len(seen) >= wanted:
        return
    asks = f"{need.why} requires {wanted}"
    if len(every) >= wanted:
        cause = f"{VISIBLE} = {shown(facts.visible)} leaves {len(seen)} of its {len(every)} GPU(s)"
        fix = f"Unset it there, or set launch.ranks_per_node = {max(1, len(seen))}."
    else:
        cause = f"it shows {len(seen)} GPU(s)"
        fix = "Correct the inventory or launch.ranks_per_node: each rank takes one GPU."
    yield _error(f"{cause}, {asks}", fix)


def _driver_faults(facts: NvidiaFacts) -> Iterator[Fault]:
    """Compare the driver with the CUDA that torch was built for."""
    torch, driver = facts.torch, facts.devices()[0].driver
    if torch is None:
        return
    if torch.cuda is None:
        cause = f"its torch {torch.version} is a build without CUDA"
        yield _error(cause, "Install the CUDA build (bootstrap/install-payload.sh --torch-gpu).")
        return
    found, least = _DRIVER.fullmatch(driver), least_driver_branch(torch.cuda)
    if found is None or least is None:
        what = f"driver {shown(driver)}" if found is None else f"CUDA {torch.cuda}"
        cause = f"{what} is not known here, so the driver was not compared with torch's CUDA"
        yield _warning(cause, "See https://docs.nvidia.com/deploy/cuda-compatibility.")
    elif int(found[1]) < least:
        cause = (
            f"its driver {driver} is too old: torch {torch.version} (CUDA {torch.cuda}) needs "
            f"branch {least} or later"
        )
        yield _error(cause, f"{_install()}.")


def _device_faults(gpu: GpuDevice, *, node: Node) -> Iterator[Fault]:
    gib = node.gpu_memory_gib
    if gib and gpu.memory_mib is not None and gpu.memory_mib / 1024 < gib * _MEMORY_SHARE:
        cause = (
            f"GPU {gpu.index} has {gpu.memory_mib / 1024:.1f} GiB of memory, the inventory says "
            f"{gib:g}"
        )
        yield _error(cause, "Correct the inventory, or the machine type.")
    if gpu.mig:
        cause = f"GPU {gpu.index} is in MIG mode: a rank gets only one instance of it"
        yield _warning(cause, f"Disable MIG: `sudo nvidia-smi -i {gpu.index} -mig 0`.")
    if gpu.ecc_errors:
        cause = f"GPU {gpu.index} has {gpu.ecc_errors} uncorrected ECC error(s)"
        fix = f"Reset it (`sudo nvidia-smi -i {gpu.index} --gpu-reset`), or replace the node."
        yield _warning(cause, fix)


def _parse(row: str) -> GpuDevice | None:
    """Return the GPU of a row; None for another line, such as a warning."""
    cells = [cell.strip() for cell in printable(row).split(",", len(QUERY) - 1)]
    if len(cells) != len(QUERY) or not _NUMBER.fullmatch(cells[0]):
        return None
    index, uuid, memory, driver, capability, mig, ecc, errors, name = cells
    if not uuid:
        return None
    return GpuDevice(
        index=int(index),
        uuid=uuid,
        name=name,
        memory_mib=int(memory) if _NUMBER.fullmatch(memory) else None,
        driver=driver,
        capability=capability if CAPABILITY.fullmatch(capability) else None,
        mig=mig == "Enabled",
        ecc=ecc == "Enabled",
        # [N/A] where there is no ECC, or it is off.
        ecc_errors=int(errors) if _NUMBER.fullmatch(errors) else 0,
    )


def _all_or_some(values: Sequence[bool]) -> str:
    return "on" if all(values) else f"on for {sum(values)} of {len(values)}"


def _words(said: str) -> str:
    """Return the first line that a program said."""
    return one_line(said).rstrip(".") if said.strip() else "no output"


def _install() -> str:
    return f"Install NVIDIA's driver, branch {NVIDIA_DRIVER_BRANCH} (bootstrap/node-setup.sh does)"


def _error(cause: str, fix: str) -> Fault:
    return Fault(severity="error", cause=cause, fix=fix)


def _warning(cause: str, fix: str) -> Fault:
    return Fault(severity="warning", cause=cause, fix=fix)
