"""CONTRACT: parses the NVIDIA GPUs of a machine from nvidia-smi, and finds their faults.

Sources: https://docs.nvidia.com/deploy/nvidia-smi (columns and output),
https://docs.nvidia.com/cuda/cuda-programming-guide, "CUDA Environment Variables" (the effect of
CUDA_VISIBLE_DEVICES), https://docs.nvidia.com/deploy/nvml-api, nvmlReturn_t (exit statuses).
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
"""Columns of the nvidia-smi query; `name` is last because it may contain commas."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_VISIBLE_CHARS = 4096
"""Maximum length of CUDA_VISIBLE_DEVICES that is read; the UUIDs of 100 GPUs fit."""
MOST_CHARS = 2**16
"""Maximum length of nvidia-smi's output that is read; a GPU's row has about 150 characters."""

_MEMORY_SHARE = 0.9
"""Share of the memory in the inventory that a GPU must at least report. Firmware reserves some
memory: an L4 of 24 GB reports 23,034 MiB."""
_NUMBER = re.compile(r"[0-9]{1,15}")
_DRIVER = re.compile(r"([0-9]{1,4})(?:\.[0-9]{1,6}){1,3}")
_PRINTABLE = re.compile(r"[ -~]+")
_LOG = "See the kernel's log on the node (`dmesg | grep -i nvrm`)"

# Keys are exit statuses as in nvmlReturn_t; 18 is NVML_ERROR_LIB_RM_VERSION_MISMATCH.
_FIXES = {
    6: f"{_LOG}; a GPU that has fallen off the bus needs a reboot.",
    9: "Load the driver's module: `sudo modprobe nvidia`. Secure Boot loads only a signed module.",
    15: "Reboot the node; if it happens again, replace it.",
    16: "Reset the GPU (`sudo nvidia-smi --gpu-reset`), or reboot the node.",
    18: "Reboot the node, so that the loaded kernel module matches the installed driver.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiOutput:
    """Output of nvidia-smi for QUERY."""

    status: int | None
    """Exit status; None if nvidia-smi did not end in time."""
    said: str = checked(max_chars=MOST_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The build of torch that ranks load, as described in its version.py."""

    version: str = checked(pattern=_PRINTABLE, wanted="printable ASCII", max_chars=64)
    cuda: str | None = checked(None, pattern=_PRINTABLE, wanted="such as 13.0", max_chars=64)
    """CUDA version; None for a build without CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaFacts:
    """The facts about the GPUs of a machine."""

    smi: SmiOutput | None
    """Output of nvidia-smi; None if nvidia-smi is not on PATH."""
    visible: str | None = checked(None, max_chars=MOST_VISIBLE_CHARS)
    """The beginning of CUDA_VISIBLE_DEVICES; None if it is not set."""
    torch: TorchBuild | None = None
    """The build of torch; None if it is unknown."""

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return every GPU, visible or not."""
        done = self.smi is not None and self.smi.status == 0
        rows = self.smi.said.splitlines() if done and self.smi is not None else []
        found: dict[str, GpuDevice] = {}
        for gpu in filter(None, map(_parse, rows)):
            found.setdefault(gpu.uuid, gpu)
        return tuple(found.values())

    def visible_devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that are visible to a program, in the order in which a program sees
        them."""
        return visible_gpus(self.devices(), self.visible)

    def usable_devices(self) -> tuple[GpuDevice, ...]:
        """Return the visible GPUs that torch on the machine can use; empty with a CPU build."""
        visible = self.visible_devices()
        if not visible or self.torch is None or self.torch.cuda is None:
            return ()
        refused = any(fault.severity == "error" for fault in _driver_faults(self))
        return () if refused else visible

    def describe(self) -> str:
        """Return a description of the GPUs, with the driver and other properties."""
        every, visible = self.devices(), self.visible_devices()
        if not every:
            return "no GPU"
        kinds = list(dict.fromkeys((gpu.name, gpu.memory_mib) for gpu in every))
        counts = [sum((gpu.name, gpu.memory_mib) == kind for gpu in every) for kind in kinds]
        parts = [
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
            modes.append(
                f"{VISIBLE} = {shown(self.visible)} makes {len(visible)} of {len(every)} visible"
            )
        return ", ".join([*parts, *modes])


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One GPU, from a row of nvidia-smi's output."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    driver: str
    capability: str | None
    mig: bool
    """True if MIG is on. A program can then use only one MIG instance."""
    ecc: bool
    ecc_errors: int
    """Number of uncorrected memory errors since the driver was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a machine's GPUs."""

    severity: Literal["error", "warning"]
    cause: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """The GPUs that ranks need on each node."""

    why: str
    """The setting (or the inventory) that requires the GPUs, as the subject of a sentence."""
    ranks_per_node: int | None
    """Number of ranks on each node; None for one rank per GPU."""

    def on(self, node: Node) -> int:
        """Return the number of ranks that need a GPU on this node."""
        return self.ranks_per_node or node.gpus or 1


def gpu_need(config: RunConfig, nodes: Sequence[Node]) -> GpuNeed | None:
    """Return which GPUs a run needs; None if its ranks compute on CPUs.

    `ResolvedInventory.gpu_need` adds the number of ranks on each node.
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
    """Return the config with the device that `device.kind = "auto"` resolves to on these nodes."""
    if gpu_need(config, nodes) is None:
        return config
    return config.on_device("cuda")


GPU_GUESS = "the predicted step time assumes an MFU that was not measured on GPUs"
"""Note of a plan with a predicted step time on GPUs."""


def with_gpus(node: Node, facts: NvidiaFacts) -> Node:
    """Return the node with the number of usable GPUs, and the properties of the smallest GPU."""
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
    """Return the location of the installed torch's version.py: a folder, and the path in the
    folder."""
    found = importlib.util.find_spec("torch")
    folder = Path(found.origin).parent if found is not None and found.origin else Path(sys.prefix)
    return str(folder), "version.py"


def require_gpus(facts: NvidiaFacts, *, need: GpuNeed, node: Node) -> None:
    """Raise ConfigError with a fix if the GPUs of this machine are not fit for a run."""
    for fault in gpu_faults(facts, need=need, node=node):
        if fault.severity == "error":
            raise ConfigError(f"{need.why}: this machine: {fault.cause}. {fault.fix}")


def gpu_faults(
    facts: NvidiaFacts, *, need: GpuNeed, node: Node, has_device: bool | None = None
) -> Iterator[Fault]:
    """Yield faults that prevent `need`, and warnings about the GPUs.

    `has_device` is True if the machine has the device file of a GPU; None if that is unknown.
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
                yield _warning(f"nvidia-smi prints: {_first_line(line)}", f"{_LOG}.")


def smi_fault(facts: NvidiaFacts) -> Fault | None:
    """Return why nvidia-smi shows no GPU; None if it shows GPUs or is missing."""
    smi = facts.smi
    if smi is None or facts.devices():
        return None
    if smi.status is None:
        return _error("nvidia-smi does not respond", f"{_LOG}, and reboot the node.")
    if smi.status != 0:
        cause = f"nvidia-smi fails with status {smi.status}: {_first_line(smi.said)}"
        return _error(cause, _FIXES.get(smi.status, f"{_install()}."))
    return _error(f"nvidia-smi shows no GPU: {_first_line(smi.said)}", f"{_LOG}.")


def _absent_smi(facts: NvidiaFacts, *, need: GpuNeed, has_device: bool | None) -> Iterator[Fault]:
    """Yield a fault if nvidia-smi is missing, as in some containers."""
    if has_device:
        return
    cause = f"nvidia-smi is missing, but {need.why} requires GPUs"
    if has_device is None and facts.torch is not None and facts.torch.cuda is not None:
        yield _warning(
            cause, "The trial shows whether the CUDA build of torch on this node finds a GPU."
        )
    else:
        yield _error(cause, f"{_install()}, or set device.kind = 'cpu'.")


def visible_gpus(every: Sequence[GpuDevice], visible: str | None) -> tuple[GpuDevice, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in the order of its entries.

    Each entry is an index or the prefix of one GPU's UUID. The first invalid entry ends the list,
    and with a repeated entry, no GPU is selected. A MIG instance counts as a GPU of unknown memory.
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
        yield _warning(
            cause, "Shorten this variable on the node, for example to the GPUs' indexes."
        )


def _count_faults(facts: NvidiaFacts, *, need: GpuNeed, node: Node) -> Iterator[Fault]:
    every, visible, count = facts.devices(), facts.visible_devices(), need.on(node)
    if len(visible) >= count:
        return
    requires = f"{need.why} requires {count}"
    if len(every) >= count:
        cause = (
            f"{VISIBLE} = {shown(facts.visible)} makes {len(visible)} of its {len(every)} GPU(s) "
            "visible"
        )
        fix = (
            "Unset this variable on the node, or set launch.ranks_per_node = "
            f"{max(1, len(visible))}."
        )
    else:
        cause = f"nvidia-smi shows {len(visible)} GPU(s)"
        fix = "Correct the inventory or launch.ranks_per_node: each rank uses one GPU."
    yield _error(f"{cause}, {requires}", fix)


def _driver_faults(facts: NvidiaFacts) -> Iterator[Fault]:
    """Yield a fault if the driver does not support the CUDA version of torch."""
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
        cause = f"{what} is unknown, so the driver was not compared with torch's CUDA"
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
            f"GPU {gpu.index} has {gpu.memory_mib / 1024:.1f} GiB of memory, but the inventory "
            f"lists {gib:g}"
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
    """Return the GPU in a row of nvidia-smi; None for any other line, such as a warning."""
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
        # The value is [N/A] if the GPU has no ECC or ECC is off.
        ecc_errors=int(errors) if _NUMBER.fullmatch(errors) else 0,
    )


def _all_or_some(values: Sequence[bool]) -> str:
    return "on" if all(values) else f"on for {sum(values)} of {len(values)}"


def _first_line(output: str) -> str:
    """Return the first line of a program's output."""
    return one_line(output).rstrip(".") if output.strip() else "no output"


def _install() -> str:
    return f"Install NVIDIA's driver, branch {NVIDIA_DRIVER_BRANCH} (bootstrap/node-setup.sh does)"


def _error(cause: str, fix: str) -> Fault:
    return Fault(severity="error", cause=cause, fix=fix)


def _warning(cause: str, fix: str) -> Fault:
    return Fault(severity="warning", cause=cause, fix=fix)
