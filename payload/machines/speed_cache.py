"""CONTRACT: the measured speed of this machine, kept in the user's cache.

`payload.train.measure_machine` writes the file, and runs refresh it; `plan` and `finetune` read it.
A file is valid for one combination of CPU model, CPU flags, number of usable cores and version of
torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from payload.core.dtype import BF16_MIN_GAIN, Dtype
from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.regular_files import read_bytes
from payload.core.user_cache import user_cache
from payload.core.validation.fields import MAX_SECONDS, checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.names import SHA256
from payload.core.validation.records import build, check_schema
from payload.machines.core_use import MOST_OTHERS
from payload.machines.machine import discover
from payload.machines.machine_facts import read_cpu

SCHEMA_VERSION = 4
ISA_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Variables that keep torch's libraries from using some instructions of the CPU."""

_BUSY_S = 600.0
"""Time after which a machine that was busy is measured again."""
_PLAIN = re.compile(r"[^\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedKey:
    """The properties of a machine that a measurement depends on."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    """Usable physical cores, within affinity and the limits of a container."""
    torch: str
    """Version of torch."""
    masks: tuple[tuple[str, str], ...] = ()
    """The variables of `ISA_VARIABLES` that are set, with their values."""

    @classmethod
    def of_this_machine(
        cls, env: Mapping[str, str], *, cores: int | None = None, proc_root: Path = Path("/proc")
    ) -> SpeedKey | None:
        """Return the key of this machine, or None if torch is not installed.

        `cores` replaces the number of usable cores.
        """
        torch = torch_version()
        if torch is None:
            return None
        cpu, flags = read_cpu(proc_root / "cpuinfo")
        return cls(
            cpu=cpu,
            flags=tuple(sorted(flags)),
            cores=cores or discover().num_cores(),
            torch=torch,
            masks=tuple((name, env[name]) for name in ISA_VARIABLES if env.get(name)),
        )

    def sha256(self) -> str:
        """Return the digest of all properties."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def torch_version() -> str | None:
    """Return the installed version of torch without importing torch; None if it is missing."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpeed:
    """Measured times of a rank's layers without their matmuls.

    The matmuls are assumed to run at the GEMM peak.
    """

    threads: int = checked(low=1, high=2**20)
    """Threads of each rank. The ranks of all cores were measured at the same time."""
    element_s: float = checked(low=0, high=1)
    """Seconds for each element that the layers write between their matmuls."""
    weight_s: float = checked(low=0, high=1)
    """Seconds for each trained weight: its conversion for the matmuls, and its gradient."""
    layer_s: float = checked(low=0, high=1)
    """Seconds for each layer in each micro-batch, without computation: mostly Python's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """The measured speeds of a rank other than its GEMM peak."""

    update_core_s: float
    """Seconds per weight and core of AdamW's update, as in `MachineSpeed`."""
    layers: LayerSpeed | None
    """None if the layers were not measured in the run's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """The measured speed of all usable cores together."""

    key_sha256: str = checked(pattern=SHA256, wanted="64 hexadecimal digits")
    cpu: str = checked(pattern=_PLAIN, wanted="a CPU's name", max_chars=1000)
    """Name of the CPU, for people."""
    cores: int = checked(low=1, high=2**20)
    bf16_flops_per_s: float = checked(low=1, high=1e18)
    """GEMM peak in bf16."""
    fp32_flops_per_s: float = checked(low=1, high=1e18)
    """GEMM peak in fp32."""
    update_core_s: float = checked(above=0, high=1)
    """Seconds of one core for AdamW's update of one weight, while all cores update. The update is
    limited by memory bandwidth: it moves 28 bytes."""
    layers: tuple[LayerSpeed, ...] = checked(max_items=2)
    """Measurements of a model's layers, in the dtype that a run chooses on this machine."""
    others_share: float = checked(low=0, high=1)
    """Share of the cores that other programs used during the measurement."""
    measured_unix: float = checked(low=0, high=MAX_SECONDS)
    schema_version: int = SCHEMA_VERSION

    def flops_per_s(self, dtype: Dtype) -> float:
        """Return the GEMM peak of all usable cores in `dtype`."""
        return self.bf16_flops_per_s if dtype == "bf16" else self.fp32_flops_per_s

    def dtype(self) -> Dtype:
        """Return the dtype that a run chooses on this machine."""
        is_bf16 = self.bf16_flops_per_s >= BF16_MIN_GAIN * self.fp32_flops_per_s
        return "bf16" if is_bf16 else "fp32"

    def layer_speed(self, dtype: Dtype, *, threads: int) -> LayerSpeed | None:
        """Return the measurement for ranks with `threads` threads; None in a different dtype.

        For any other number of threads, the measurement with the most threads is scaled.
        """
        if dtype != self.dtype() or not self.layers:
            return None
        for each in self.layers:
            if each.threads == threads:
                return each
        most = max(self.layers, key=lambda each: each.threads)
        share = most.threads / threads
        return replace(
            most,
            threads=threads,
            element_s=share * most.element_s,
            weight_s=share * most.weight_s,
        )

    def rank_speed(self, dtype: Dtype, *, threads: int) -> RankSpeed:
        """Return the speed of a rank with `threads` threads that computes in `dtype`."""
        layers = self.layer_speed(dtype, threads=threads)
        return RankSpeed(update_core_s=self.update_core_s, layers=layers)

    def is_usable(self) -> bool:
        """Return whether the cores were free enough for the measurement to hold."""
        return self.others_share <= MOST_OTHERS

    def is_current(self, now_unix: float) -> bool:
        """Return False if other programs used the cores and the machine must be measured again."""
        return self.is_usable() or abs(now_unix - self.measured_unix) < _BUSY_S

    def date(self) -> str:
        """Return the day of the measurement in local time, such as 2026-11-28."""
        return datetime.fromtimestamp(self.measured_unix).date().isoformat()


def speed_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of the measurements. Raises RuntimeError without a home folder."""
    return user_cache(env) / "speed"


def speed_path(folder: Path, key: SpeedKey) -> Path:
    """Return the file of a machine's measurement."""
    return folder / f"{key.sha256()[:24]}.json"


def read_speed(folder: Path, key: SpeedKey) -> MachineSpeed | None:
    """Return the measurement for `key`; None if it is missing, damaged or has a different key."""
    path = speed_path(folder, key)
    try:
        raw = parse_json(read_bytes(path), where=str(path))
        check_schema(raw, SCHEMA_VERSION, where=str(path))
        speed = build(MachineSpeed, raw, where=str(path))
    except (OSError, ConfigError):
        return None
    return speed if speed.key_sha256 == key.sha256() else None


def write_speed(folder: Path, key: SpeedKey, speed: MachineSpeed) -> None:
    """Write the measurement of this machine. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(speed_path(folder, key), json.dumps(asdict(speed), indent=2) + "\n", durable=False)


def refresh_speed(
    env: Mapping[str, str], *, cores: int, dtype: Dtype, flops_per_s: float, now_unix: float
) -> None:
    """Replace the GEMM peak in `dtype` that is known for `cores` cores; ignore a failure to write.

    A run measures only some of the values, so it never creates a new file.
    """
    with suppress(OSError, RuntimeError):
        key, folder = SpeedKey.of_this_machine(env, cores=cores), speed_folder(env)
        known = read_speed(folder, key) if key else None
        if key is None or known is None or not known.is_usable():
            return
        is_bf16 = dtype == "bf16"
        speed = replace(
            known,
            bf16_flops_per_s=flops_per_s if is_bf16 else known.bf16_flops_per_s,
            fp32_flops_per_s=known.fp32_flops_per_s if is_bf16 else flops_per_s,
            measured_unix=now_unix,
        )
        write_speed(folder, key, speed)
