"""A resume on other data is rejected, also with the same train.bin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.core.errors import CheckpointError
from payload.formats.data_folder import load_meta
from payload.run_record.run_files import RunPaths
from payload.train.checkpoints.checkpoint import load_trainer_state
from payload.train.setup import require_same_data
from tests.support.chat_data import MARKED_TEMPLATE, conversations, make_model, prepare
from tests.train.alone import train_alone
from tests.train.task_runs import CHAT_LENGTH, CLASSIFY, chat_config, classify_base, classify_data

pytestmark = pytest.mark.usefixtures("one_thread")

LESS_MARKED = MARKED_TEMPLATE.replace(
    "{% generation %}{{ message['content'] +",
    "{{ message['content'][:1] }}{% generation %}{{ message['content'][1:] +",
)


@pytest.mark.processes  # rendering the template starts one
def test_conversations_whose_template_marks_other_tokens_are_other_data(tmp_path: Path) -> None:
    assert LESS_MARKED != MARKED_TEMPLATE
    model = make_model(tmp_path / "model", template=MARKED_TEMPLATE)
    config = chat_config(tmp_path, model, [{"messages": each} for each in conversations(20)])
    train_alone(tmp_path / "run", config, "train.steps=1")
    data = load_run_config(config).data.folder()
    (model / "chat_template.jinja").write_text(LESS_MARKED, encoding="utf-8")
    source = next(tmp_path.rglob("*.jsonl"))
    other = prepare(model, source, tmp_path / "other", "--sequence-length", CHAT_LENGTH)
    assert (other / "train.bin").read_bytes() == (data / "train.bin").read_bytes()
    with pytest.raises(CheckpointError, match=r"trained on train\S* \w{12}, but data\.dir has"):
        train_alone(tmp_path / "run", config, f"data.dir={other}", "train.steps=2")
    train_alone(tmp_path / "run", config, "train.steps=2")


@pytest.mark.parametrize("changed", ["train.examples.bin", "val.bin", "val.examples.bin"])
def test_other_labels_and_validation_texts_are_other_data_but_for_a_checkpoint_of_before(
    tmp_path: Path, tiny_config: Path, caplog: pytest.LogCaptureFixture, changed: str
) -> None:
    (tmp_path / "base").mkdir()
    data, base = classify_data(tmp_path), classify_base(tmp_path / "base")
    settings = (*CLASSIFY, f"model.init={base}", f"data.dir={data}")
    train_alone(tmp_path / "run", tiny_config, *settings, "train.steps=1")
    state = load_trainer_state(RunPaths(tmp_path / "run").checkpoint(1))
    meta = load_meta(data)
    require_same_data(state, meta)
    files = {**meta.files, changed: replace(meta.files[changed], sha256="0" * 64)}
    other = replace(meta, files=files)
    with pytest.raises(
        CheckpointError, match=rf"trained on {changed} \w{{12}}, but data\.dir has 0"
    ):
        require_same_data(state, other)
    caplog.clear()
    require_same_data(replace(state, data_sha256={}), other)
    assert "is from an older version, which stored only the hash of train.bin." in caplog.text
