"""The launcher mpirun of Intel MPI, which starts ranks over SSH; ranks communicate by gloo."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from payload.launch.launcher import (
    BOOTSTRAP_AGAIN,
    MISSING_LIBRARY,
    Job,
    KilledRank,
    Launcher,
    LostNode,
    Reach,
    Report,
    TrialFailure,
)
from payload.machines.inventory import Node
from payload.machines.rank_variables import INTEL_MPI

# mpirun prints these lines after all ranks have ended.
_KILLED = re.compile(
    r"RANK (?P<rank>\d+) PID \d+ RUNNING AT (?P<address>\S+)\s*\n"
    r"=\s+KILLED BY SIGNAL: (?P<signal>\d+)"
)
_DOWNSTREAM = re.compile(
    r"downstream from host (?P<host>\S+) (?P<how>exited [\w ]+|was killed by signal \d+)",
    re.IGNORECASE,
)
_UNRESOLVED = re.compile(r"getaddrinfo.*(?:name resolution|not known)", re.IGNORECASE)
_UNABLE = re.compile(r"[Uu]nable to run bstrap_proxy on (\S+) \(pid \d+, exit code (\d+)\)")
_SIGNED_LINE = re.compile(r"^\[[^@\]\n]*@([^\]\n]+)\] (.*)$", re.MULTILINE)
_SERVER = re.compile(r"unable to connect to server (\S+) at port")
_INTERFACE = re.compile(r"unable to find interface (\S+)")


class Mpirun(Launcher):
    """Starts ranks with Intel MPI, on x86-64 Linux only."""

    variables = INTEL_MPI
    program = "mpirun"
    install = "pip install impi-rt==2021.18.1"
    version = "Intel(R) MPI"
    preference = 0
    # The guesses that every failed mpirun prints, and torch's warning about unresolved addresses.
    noise = re.compile(
        r"^\[mpiexec@[^\]]*\] (?:Possible reasons|\d\. |   )"
        r"|hostname of the client socket cannot be"
    )

    def unfit(self, system: str, machine: str) -> str | None:
        """Return why Intel MPI cannot run on this system and machine type, or None."""
        if machine in ("x86_64", "AMD64") and system == "linux":
            return None
        return f"Intel MPI runs on x86-64 Linux only; this is {system} on {machine}"

    def argv(self, job: Job) -> tuple[str, ...]:
        """Return the command line of mpirun, with the option names of Intel's guides.

        Without `-noconf`, mpirun reads options from `mpiexec.conf` in the current folder. These
        options could start any program.
        """
        variables = [text for item in sorted(job.environment.items()) for text in ("-genv", *item)]
        return (
            *(job.executable, "-noconf"),
            *("-f", str(job.hosts), "-n", str(job.world_size), "-ppn", str(job.ranks_per_node)),
            *variables,
            job.python,
            *job.rank_arguments,
        )

    def settings(self, reach: Reach) -> dict[str, str]:
        """Return the variables that configure hydra, mpirun's process manager.

        On one node, hydra forks, so that it uses neither ssh nor a scheduler that it detects by
        mistake. On several nodes, hydra uses ssh with the run's key. It splits the arguments of ssh
        at spaces, so the path of ssh's config must not contain a space. With the interface set,
        hydra need not resolve the hostname of the head. Resolving it fails on many machines
        ("getaddrinfo ... Temporary failure in name resolution"). Pinning is off because each rank
        sets its CPU affinity from the rank file. I_MPI_FABRICS does not matter: the ranks send
        nothing by MPI.
        """
        settings = {"I_MPI_HYDRA_BOOTSTRAP": "ssh" if reach.ssh else "fork"}
        if reach.ssh:
            settings["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = " ".join(reach.ssh)
        return settings | {"I_MPI_HYDRA_IFACE": reach.interface, "I_MPI_PIN": "off"}

    def report(self, text: str) -> Report:
        """Find killed ranks, lost nodes and unresolved names in the output of hydra."""
        killed, lost = _KILLED.search(text), _DOWNSTREAM.search(text)
        return Report(
            killed=KilledRank(
                rank=int(killed["rank"]), address=killed["address"], signal=int(killed["signal"])
            )
            if killed
            else None,
            lost=LostNode(address=lost["host"], how=lost["how"]) if lost else None,
            not_started="the launcher could not resolve this machine's own name. Add it to "
            "/etc/hosts: 127.0.0.1 NAME"
            if _UNRESOLVED.search(text)
            else None,
        )

    def trial_failures(
        self, text: str, *, nodes: Sequence[Node], hostnames: Mapping[str, str]
    ) -> Iterator[TrialFailure]:
        """Yield the errors of hydra and its helpers; their lines begin with a hostname."""
        by_address, head = {node.address: node for node in nodes}, nodes[0]
        unresolved = dict.fromkeys(
            hostnames.get(who, who)
            for who, message in _SIGNED_LINE.findall(text)
            if "getaddrinfo" in message
        )
        server = _SERVER.search(text)
        for name in unresolved:
            target = f" {server[1]!r}" if server else ""
            cause = (
                f"mpirun's helper on this node cannot resolve the name{target}: getaddrinfo: "
                "Temporary failure in name resolution"
            )
            fix = (
                f"Add a line with this name and the address {head.address} to /etc/hosts on this "
                "node."
            )
            yield TrialFailure(node=name, cause=cause, fix=fix)
        if unresolved:
            return
        interface = _INTERFACE.search(text)
        if interface:
            cause = f"mpirun finds no interface {interface[1]} on this node"
            yield TrialFailure(
                node=head.name, cause=cause, fix="List the interfaces of this node: `ip addr`."
            )
            return
        library, unable = MISSING_LIBRARY.search(text), _UNABLE.search(text)
        node = by_address.get(unable[1], head) if unable else head
        if unable:
            yield _unable(node.name, int(unable[2]), text, library=library)
        elif library:
            cause = f"mpirun lacks the library {library[1]} on this node"
            yield TrialFailure(node=node.name, cause=cause, fix=BOOTSTRAP_AGAIN)


def _unable(node: str, status: int, text: str, *, library: re.Match[str] | None) -> TrialFailure:
    """Return the failure of a helper on a worker; `status` is the wait status."""
    code, fix = status >> 8, BOOTSTRAP_AGAIN
    if library:
        cause = f"mpirun's helper lacks the library {library[1]} on this node"
    elif code in (126, 127):
        why = "cannot be run" if code == 126 else "is missing"
        cause = f"mpirun's helper hydra_bstrap_proxy {why} on this node"
    elif code == 255:
        cause, fix = (
            "this node closed the ssh connection from the head",
            "See the log of sshd on this node: journalctl -u ssh.",
        )
    elif _SERVER.search(text):
        cause = "mpirun's helper on this node cannot connect back to the head"
        fix = "Open all TCP ports between the nodes."
    else:
        cause = f"mpirun's helper on this node ended with status {code}"
    return TrialFailure(node=node, cause=cause, fix=fix)


LAUNCHER = Mpirun()
