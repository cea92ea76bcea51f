"""/proc/cpuinfo of Arm servers, as Linux writes the text: features and numbers, but no name."""

from __future__ import annotations

from collections.abc import Mapping

_NEOVERSE_V1 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma "
    "lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg "
    "dcpodp svei8mm svebf16 i8mm bf16 dgh rng"
)
_NEOVERSE_V2 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma "
    "lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm sb paca pacg "
    "dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svebf16 i8mm bf16 "
    "dgh rng bti"
)
_NEOVERSE_N1 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop "
    "asimddp ssbs"
)


def _cpuinfo(features: str, *, part: str, variant: str) -> str:
    core = (
        f"BogoMIPS\t: 50.00\nFeatures\t: {features}\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU variant\t: {variant}\nCPU part\t: {part}\nCPU revision\t: 1\n"
    )
    return "\n".join(f"processor\t: {number}\n{core}" for number in range(2)) + "\n"


ARM_CPUINFO: Mapping[str, str] = {
    "Graviton 3": _cpuinfo(_NEOVERSE_V1, part="0xd40", variant="0x1"),
    "Axion": _cpuinfo(_NEOVERSE_V2, part="0xd4f", variant="0x0"),
    "Altra": _cpuinfo(_NEOVERSE_N1, part="0xd0c", variant="0x3"),
}
"""Texts by server. Sources of the features: Arm's learning paths for Graviton 3 and V2,
archspec-json issue 41 for N1, EESSI's software-layer issue 845 for Axion."""
