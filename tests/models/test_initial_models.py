"""A run that starts from a hub name or a GGUF file, and resumes without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.core.errors import ExitCode
from payload.evaluate.__main__ import main as evaluate
from payload.formats.tokenizer_identity import folder_identity
from tests.export.models import VOCAB, export, make_llama
from tests.models.fake_model_hub import FIRST, NAME, SECOND, model_hub
from tests.support.data_folders import make_data_folder
from tests.support.launching import losses, mpirun, rank_env, run, train_program

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama with a tokenizer."""
    return make_llama(tmp_path_factory.mktemp("initial") / "model", "Llama")


@pytest.fixture(scope="module")
def settings(model: Path, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the settings beyond the tiny run's: data with the model's tokenizer, and sizes."""
    identity = folder_identity(model)
    assert identity is not None
    data = make_data_folder(
        tmp_path_factory.mktemp("initial") / "data",
        vocab_size=VOCAB,
        tokenizer_sha256=identity.vocabulary_sha256,
    )
    sizes = [f"model.{name}=none" for name in ("n_layer", "n_head", "n_embd")]
    more = ["train.checkpoint_every=2", "engine.kernels=off", "schedule.warmup_steps=0"]
    return [*sizes, f"data.dir={data}", *more]


def trained(
    folder: Path, config: Path, *overrides: str, env: Mapping[str, str], num_ranks: int = 1
) -> list[float]:
    result = run(mpirun(num_ranks, *train_program(folder, config, *overrides)), env=env)
    assert result.returncode == 0, result.stderr
    return losses(folder)


@pytest.mark.slow
def test_a_run_keeps_the_commit_it_began_with_on_every_rank_and_without_the_hub(
    model: Path, settings: list[str], tiny_config: Path, tmp_path: Path
) -> None:
    folder, commits = tmp_path / "run", {FIRST: model}
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    words = [*settings, f"model.init={NAME}"]
    with model_hub(commits) as endpoint:
        env = rank_env(**home, HF_HUB_OFFLINE="0", HF_ENDPOINT=endpoint)
        begun = trained(folder, tiny_config, *words, "train.steps=2", env=env, num_ranks=2)
    assert load_run_config(folder / "run.toml").model.init == f"{NAME}@{FIRST}"
    other = tmp_path / "other"
    other.mkdir()
    commits[SECOND] = other
    # As in an operator's copy, which replaces the run folder's at a resume.
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace(f"@{FIRST}", ""))
    env = rank_env(**home)
    whole = trained(folder, tiny_config, *words, "train.steps=4", env=env)
    assert load_run_config(folder / "run.toml").model.init == f"{NAME}@{FIRST}"
    assert whole[:2] == begun and len(whole) == 4
    # A new run finds the downloaded commit without any request.
    env = rank_env(**home, HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    again = trained(tmp_path / "again", tiny_config, *words, "train.steps=2", env=env)
    assert again == pytest.approx(begun, rel=1e-5)
    assert load_run_config(tmp_path / "again" / "run.toml").model.init == f"{NAME}@{FIRST}"


@pytest.mark.slow
def test_a_gguf_file_is_a_model_to_start_from_and_a_resume_does_not_need_it(
    model: Path,
    settings: list[str],
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    file, home, folder = tmp_path / "small.gguf", tmp_path / "home", tmp_path / "run"
    assert export(model, file, "--dtype", "bf16") == ExitCode.OK
    env = rank_env(HF_HOME=str(home))
    words = [*settings, f"model.init={file}"]
    begun = trained(folder, tiny_config, *words, "train.steps=2", env=env)
    checkpoint = folder / "checkpoints" / "step_00000002"
    assert folder_identity(checkpoint) == folder_identity(model)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    data = settings[3].removeprefix("data.dir=")
    found = []
    for name in (file, model):
        capsys.readouterr()
        arguments = ["--checkpoint", str(name), "--data", data, "--sequence-length", "32"]
        assert evaluate([*arguments, "--json"], {}) == ExitCode.OK
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["val_loss"])
    # The file's matrices are rounded to bf16.
    assert found[0] == pytest.approx(found[1], rel=5e-3)
    file.unlink()
    assert trained(folder, tiny_config, *words, "train.steps=4", env=env)[:2] == begun
