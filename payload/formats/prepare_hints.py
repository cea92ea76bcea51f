"""How a data folder is made, or made again: the words of every command that finds it unfit."""

from __future__ import annotations

from pathlib import Path

from payload.core.one_line import printable_line
from payload.core.printable_text import printable
from payload.core.suggested_commands import command

# Folders whose name says what is in them. What lies under any other name is the user's own, and no
# source may be named for it: the command would put that in its place.
_KNOWN = ("openwebtext", "stdlib")
_KINDS = {".jsonl": "jsonl", ".gz": "jsonl", ".parquet": "parquet"}
# What `prepare` leaves in a folder that it has not finished.
_WRITTEN = (".prepare.jsonl", "train.bin", "val.bin", "train.bin.partial", "val.bin.partial")


def missing_data(folder: Path) -> str:
    """Say what is at `folder` instead of a finished data folder, and how to make one."""
    if not folder.exists():
        return f"data folder {folder} does not exist. {_how_to_make(folder)}"
    if not folder.is_dir():
        return f"data.dir = {folder} is a file, not a data folder. {_how_to_prepare(folder)}"
    if _was_begun(folder):
        return (
            f"data folder {folder} has no meta.json: it was not made to the end. "
            f"{_how_to_make(folder)}"
        )
    if any(folder.iterdir()):
        return (
            f"data.dir = {folder} has no meta.json: it is not a data folder. "
            f"{_how_to_prepare(folder)}"
        )
    return f"data folder {folder} has no meta.json: it is empty. {_how_to_make(folder)}"


def _was_begun(folder: Path) -> bool:
    """Say whether `prepare` has written here."""
    return any((folder / name).exists() for name in _WRITTEN)


def _how_to_make(folder: Path) -> str:
    """Return the command for a folder that is not there or not finished, as a sentence."""
    if folder.name in _KNOWN:
        return f"Make it with: {_prepare(folder.name, '--out', str(folder))}"
    return (
        f"Make it with: {_prepare('KIND', '--input', 'PATH', '--out', str(folder))} "
        "(prepare --help has the kinds; one that was stopped goes on)"
    )


def _how_to_prepare(given: Path) -> str:
    """Return the command for a file or folder of the user's own texts: data goes elsewhere."""
    name = given.stem if given.is_file() else given.name
    out = str(given.with_name(f"{name or 'my'}-tokens"))
    kind = _KINDS.get(given.suffix, "text")
    prepare = _prepare(kind, "--input", str(given), "--out", out)
    return f"If it holds your texts, prepare them with: {prepare} - and set data.dir to {out}"


def how_to_make_again(folder: Path, *, source: object) -> str:
    """The same for a damaged folder; `source` is what its meta.json says that it was made from."""
    if not isinstance(source, str):
        source = None
    plain = printable_line(source or "")[:200]
    was = f" (it was: {plain})" if plain else ""
    if folder.name in _KNOWN and (source is None or source.startswith(f"{folder.name}:")):
        again = _prepare(folder.name, "--out", str(folder), "--force")
        return f"Make it again with: {again}{was}"
    return f"Repeat the command that made it with --force{was}."


def with_tokenizer(folder: Path, *, source: str, tokenizer: str) -> str:
    """Return the command that makes `folder`'s data for another tokenizer, beside it."""
    kind, _, place = source.partition(": ")
    new = str(folder.with_name(f"{folder.name}-{Path(tokenizer.partition('@')[0]).name}"))
    arguments = ["--tokenizer", tokenizer, "--out", new]
    if kind in _KNOWN:
        return _prepare(kind, *arguments)
    where = printable_line(place.partition(", ")[0])[:200] or "PATH"
    return _prepare(printable(kind)[:20] or "KIND", "--input", where, *arguments)


def write_tokenizer_again(folder: Path) -> str:
    """Return the command by which transformers writes all files of a folder's tokenizer."""
    program = (
        f"from transformers import AutoTokenizer as T; T.from_pretrained({str(folder)!r})"
        f".save_pretrained({str(folder)!r})"
    )
    return f'python -c "{program}"'


def no_range_hashes(folder: Path) -> str:
    """Say that a folder's content is compared only once, and what changes that."""
    return (
        f"note: {folder} was made by a release that kept no hashes of parts: training compares its "
        "files whole when it starts, and not as it reads them. Add the hashes with: "
        f"{command('data', 'verify', str(folder), '--add-hashes')}"
    )


def _prepare(source: str, *arguments: str) -> str:
    return command("data", "prepare", "--source", source, *arguments)
