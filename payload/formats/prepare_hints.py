"""Messages with the command that prepares a data folder, or prepares the folder again."""

from __future__ import annotations

from pathlib import Path

from payload.core.one_line import printable_line
from payload.core.printable_text import printable
from payload.core.suggested_commands import command

# Folder names that determine the source. For any other name, a suggested command must not name a
# source, as the command would replace the user's data with data of that source.
_KNOWN = ("openwebtext", "stdlib")
_KINDS = {".jsonl": "jsonl", ".gz": "jsonl", ".parquet": "parquet"}
# Files of an incomplete `prepare`.
_WRITTEN = (".prepare.jsonl", "train.bin", "val.bin", "train.bin.partial", "val.bin.partial")


def missing_data(folder: Path) -> str:
    """Return the message and the fix for a folder that is not a complete data folder."""
    if not folder.exists():
        return f"data folder {folder} does not exist. {_how_to_make(folder)}"
    if not folder.is_dir():
        return f"data.dir = {folder} is a file, not a data folder. {_how_to_prepare(folder)}"
    if _was_begun(folder):
        return f"data folder {folder} has no meta.json: it is incomplete. {_how_to_make(folder)}"
    if any(folder.iterdir()):
        return (
            f"data.dir = {folder} has no meta.json: it is not a data folder. "
            f"{_how_to_prepare(folder)}"
        )
    return f"data folder {folder} has no meta.json: it is empty. {_how_to_make(folder)}"


def _was_begun(folder: Path) -> bool:
    """Return True if the folder has files of an incomplete `prepare`."""
    return any((folder / name).exists() for name in _WRITTEN)


def _how_to_make(folder: Path) -> str:
    """Return a sentence with the command for a missing or incomplete folder."""
    if folder.name in _KNOWN:
        return f"Make it with: {_prepare(folder.name, '--out', str(folder))}"
    return (
        f"Make it with: {_prepare('KIND', '--input', 'PATH', '--out', str(folder))} "
        "(prepare --help lists the kinds; an interrupted command resumes)"
    )


def _how_to_prepare(given: Path) -> str:
    """Return a sentence with the command that prepares texts in `given` into a new folder."""
    name = given.stem if given.is_file() else given.name
    out = str(given.parent / f"{name or 'my'}-tokens")
    kind = _KINDS.get(given.suffix, "text")
    prepare = _prepare(kind, "--input", str(given), "--out", out)
    return (
        f"If this folder contains your texts, set data.dir to {out} and prepare them with: "
        f"{prepare}"
    )


def prepare_again_hint(folder: Path, *, source: object) -> str:
    """Return a sentence with the command that makes a damaged folder again.

    `source` is the value in the folder's meta.json.
    """
    if not isinstance(source, str):
        source = None
    plain = printable_line(source or "")[:200]
    was = f" (source: {plain})" if plain else ""
    if folder.name in _KNOWN and (source is None or source.startswith(f"{folder.name}:")):
        again = _prepare(folder.name, "--out", str(folder), "--force")
        return f"Make it again with: {again}{was}"
    return f"Repeat the command that made this folder, with the option --force{was}."


def with_tokenizer(folder: Path, *, source: str, tokenizer: str) -> str:
    """Return the command that prepares the same data for a different tokenizer, in a new folder."""
    kind, _, place = source.partition(": ")
    new = str(folder.with_name(f"{folder.name}-{Path(tokenizer.partition('@')[0]).name}"))
    arguments = ["--tokenizer", tokenizer, "--out", new]
    if kind in _KNOWN:
        return _prepare(kind, *arguments)
    where = printable_line(place.partition(", ")[0])[:200] or "PATH"
    return _prepare(printable(kind)[:20] or "KIND", "--input", where, *arguments)


def write_tokenizer_again(folder: Path) -> str:
    """Return the command with which transformers writes all files of a folder's tokenizer."""
    program = (
        f"from transformers import AutoTokenizer as T; T.from_pretrained({str(folder)!r})"
        f".save_pretrained({str(folder)!r})"
    )
    return f'python -c "{program}"'


def no_range_hashes(folder: Path) -> str:
    """Return the note that a folder has no range hashes, with the command that adds them."""
    return (
        f"note: {folder} is from an older release and has no range hashes: training verifies its "
        "files only when it starts, not as it reads them. Add the hashes with: "
        f"{command('data', 'verify', str(folder), '--add-hashes')}"
    )


def _prepare(source: str, *arguments: str) -> str:
    return command("data", "prepare", "--source", source, *arguments)
