"""The chat templates that the table covers, from packages pinned by version and hash.

trl is installed, and its wheel contains its templates. llama-cpp-python and vllm have theirs in the
source package alone, which pip would build; so pip's own index client finds and downloads the file.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from tests.support.smollm2 import kept

LEAST_TEMPLATES = 150
_TRL = "1.16.0"
_TIMEOUT_S = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePackage:
    """A source package of the package index, and its members that are chat templates."""

    name: str
    version: str
    sha256: str
    members: str
    """Regular expression; its group is the template's name."""


PACKAGES = (
    SourcePackage(
        name="llama-cpp-python",
        version="0.3.36",
        sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        members=r"[^/]+/vendor/llama\.cpp/models/templates/([^/]+)\.jinja",
    ),
    SourcePackage(
        name="vllm",
        version="0.33.0",
        sha256="f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        members=r"[^/]+/examples/([^/]+)\.jinja",
    ),
)


def trl_templates() -> dict[str, str]:
    """Return the templates of the installed trl by name."""
    found = version("trl")
    assert found == _TRL, f"trl is {found}, not {_TRL}: check the table, then change the version"
    folder = files("trl") / "chat_templates"
    return {
        f"trl/{each.name.removesuffix('.jinja')}": each.read_text(encoding="utf-8")
        for each in sorted(folder.iterdir(), key=lambda each: each.name)
        if each.name.endswith(".jinja")
    }


def package_templates(package: SourcePackage) -> dict[str, str]:
    """Return the templates of a source package by name; it is downloaded once per machine."""
    name = f"{package.name}-{package.version}-source"
    archive = kept(name, lambda folder: _download(package, folder)) / "source.tar.gz"
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == package.sha256, f"{archive}: sha256 is {found}. Delete {archive.parent}"
    templates = {}
    with tarfile.open(archive) as contents:
        for member in contents:
            match = re.fullmatch(package.members, member.name)
            if match and (stream := contents.extractfile(member)):
                templates[f"{package.name}/{match[1]}"] = stream.read().decode()
    return templates


def all_templates() -> dict[str, str]:
    """Return every template by name, without the copies of another one.

    A time of day is left out of the dates that templates write, as two renderings would differ.
    """
    templates = trl_templates()
    for package in PACKAGES:
        templates |= package_templates(package)
    templates = {name: text.replace(" %H:%M:%S", "") for name, text in templates.items()}
    different = {text.strip(): name for name, text in reversed(templates.items())}
    kept_names = set(different.values())
    found = {name: text for name, text in templates.items() if name in kept_names}
    assert len(found) >= LEAST_TEMPLATES, f"{len(found)} templates, fewer than {LEAST_TEMPLATES}"
    return found


def _download(package: SourcePackage, folder: Path) -> None:
    """Download the source package without building it, which `pip download` would do."""
    command = [sys.executable, "-c", _FETCH, package.name, package.version]
    subprocess.run([*command, str(folder / "source.tar.gz")], check=True, timeout=_TIMEOUT_S)


_FETCH = """
import sys
from pathlib import Path

from pip._internal.commands.download import DownloadCommand

name, version, path = sys.argv[1:]
command = DownloadCommand("download", "")
options, _ = command.parse_args(["--no-binary", ":all:", "--quiet"])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    found = [each for each in finder.find_all_candidates(name) if str(each.version) == version]
    response = session.get(found[0].link.url_without_fragment, stream=True)
    response.raise_for_status()
    with Path(path).open("wb") as file:
        for chunk in response.iter_content(2**20):
            file.write(chunk)
"""
