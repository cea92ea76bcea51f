"""run.toml: defaults, overrides, and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.config.run_config import RunConfig, load_run_config, parse_run_config
from payload.config.training_sections import BatchSection
from payload.core.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "payload" / "configs"


def parse(text: str = "", *overrides: str) -> RunConfig:
    return parse_run_config(text, overrides=overrides, where="run.toml")


def test_an_empty_file_is_the_defaults() -> None:
    assert parse() == RunConfig()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_packaged_config_loads_and_survives_being_written_out(path: Path) -> None:
    config = load_run_config(path)
    assert parse(config.to_toml()) == config


def test_the_resolved_text_survives_hostile_strings() -> None:
    config = parse("", 'data.dir=a "b" \\ c\td é')
    assert config.data.dir == 'a "b" \\ c\td é'
    assert parse(config.to_toml()) == config


@pytest.mark.parametrize("character", ["\U0001fae9", "\U000e0001"])
def test_the_resolved_text_keeps_characters_that_are_not_printable(character: str) -> None:
    assert not character.isprintable()  # U+1FAE9 is newer than this Python's tables
    config = parse("", f"data.dir=a{character}b")
    assert parse(config.to_toml()).data.dir == f"a{character}b"


def test_overrides_win_and_need_no_quotes() -> None:
    config = parse(
        "[train]\nsteps = 5", "train.steps=7", "model.preset=tiny", "engine.compile=true"
    )
    assert (config.train.steps, config.model.preset, config.engine.compile) == (7, "tiny", True)


def test_a_value_may_have_equals_signs_in_it() -> None:
    assert parse("", "data.dir=a=b").data.dir == "a=b"


def test_whole_numbers_are_fine_where_a_fraction_may_stand() -> None:
    assert parse("", "optimizer.lr=1").optimizer.lr == 1.0


def test_none_means_the_documented_default_of_an_optional_key() -> None:
    assert parse("[train]\neval_tokens = 'none'").train.eval_tokens is None
    assert parse("", "train.eval_tokens=none").train.eval_tokens is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[trian]\nsteps = 1",
            "unknown section: 'trian'. Did you mean train\\? Known: run, data, model",
        ),
        (
            "[train]\nstep = 1",
            r"key in \[train\]: 'step'. Did you mean train\.steps\? Known: steps, log",
        ),
        ("train = 5", r"train = 5 is not a section\. Write \[train\]"),
        ("[train]\nsteps = '5'", "train.steps = '5': must be a whole number"),
        ("[train]\nsteps = 5.5", "train.steps = 5.5: must be a whole number"),
        ("[train]\nsteps = true", "train.steps = True: must be a whole number"),
        ("[train]\nsteps = 0", "train.steps = 0: must be at least 1"),
        ("[optimizer]\nlr = 0", "optimizer.lr = 0: must be above 0.0"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan: must be a finite number"),
        ("[model]\ndropout = 1.5", "model.dropout = 1.5: must be at most 0.99"),
        ("[model]\nbias = 1", "model.bias = 1: must be true or false"),
        (
            "[model]\npreset = 'gpt3'",
            "model.preset = 'gpt3': choose one of tiny, gpt2, gpt2-medium",
        ),
        ("[model]\nn_head = 5", "model.n_embd = 768 is not a multiple of model.n_head = 5"),
        ("[data]\ndir = 3", "data.dir = 3: must be text in quotes"),
        ("[train]\nsteps = 1\nsteps = 2", "not valid TOML"),
        ("[optimizer]\nmin_lr = 1", "optimizer.min_lr = 1.0 is above lr = 3e-05"),
        (
            "[schedule]\nwarmup_steps = 100",
            "warmup_steps = 100 is not below train.steps = 100",
        ),
        (
            "[schedule]\nkind = 'wsd'\nwarmup_steps = 50\ndecay_steps = 60",
            r"50 \+ 60 is more than train.steps = 100",
        ),
        (
            "[schedule]\nwarmup_steps = 9\ndecay_steps = 9",
            "decay_steps = 9 is not above warmup_steps",
        ),
        ("[batch]\nmicro_batch_size = 5", "= 32 is not a multiple of micro_batch_size = 5"),
        ("[run]\nname = '../x'", "run.name = '../x': use a name without slashes"),
    ],
)
def test_each_mistake_is_named_with_its_value_and_what_would_be_right(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 10


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("[train]\nsteps = 0\nfoo = 1\n[run]\nseed = -1", "batch", "modl.preset=tiny")
    for part in ("train.steps", "'foo'", "run.seed = -1", "--set batch:", "section 'modl'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=5", r"unknown key in \[train\]: 'step'. Did you mean train\.steps\? Known: "),
        ("train.stpes=5", r"unknown key .* Did you mean train\.steps\? "),
        ("train.lr=1", r"unknown key .* Did you mean optimizer\.lr\? "),
        ("trian.steps=5", r"unknown section 'trian'. Did you mean train\.steps\? "),
        ("train.zzz=5", r"unknown key in \[train\]: 'zzz'. Known: "),
        ("steps=5", r"write the setting as section\.key=value.* Did you mean train\.steps\?"),
        ("train.steps=many", "train.steps = 'many': must be a whole number"),
        ("train.steps=0", "train.steps = 0: must be at least 1"),
    ],
)
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_config_file(
    override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse("[train]\nsteps = 3", override)
    assert str(caught.value).startswith(f"--set {override}: ")
    assert "run.toml" not in str(caught.value)


def test_an_override_that_mends_the_file_leaves_nothing_to_complain_of() -> None:
    assert parse("[train]\nsteps = 0", "train.steps=4").train.steps == 4


def test_a_file_with_a_byte_order_mark_is_read_as_without(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")
    assert load_run_config(tmp_path / "x.toml").train.steps == 7


def test_an_override_within_what_is_no_section_does_not_hide_the_mistake() -> None:
    with pytest.raises(ConfigError, match=r"train = 5 is not a section\. Write \[train\]"):
        parse("train = 5", "train.steps=7")


def test_uneven_batch_names_the_two_nearest_that_fit() -> None:
    batch = BatchSection(global_batch_size=100, micro_batch_size=8)
    with pytest.raises(ConfigError, match=r"= 48\. Use 96 or 144"):
        batch.grad_accum_steps(6)
    with pytest.raises(ConfigError, match=r"= 800\. Use 800"):
        batch.grad_accum_steps(100)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load_run_config(tmp_path / "nowhere.toml")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"x\.toml: byte 0 is not UTF-8"):
        load_run_config(tmp_path / "x.toml")


def test_a_hang_limit_that_gloo_would_forestall_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"limits\.hang_timeout_s = 120 is above nine tenths of"):
        parse_run_config("[distributed]\ntimeout_s = 130\n", where="test")
    parse_run_config(
        "[distributed]\ntimeout_s = 130\n[limits]\nhang_timeout_s = 117\n", where="test"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[optimizer]\nlr = 1" + "0" * 400, "must be a finite number"),
        ("[train]\nsteps = 1" + "0" * 30, "must be a finite number"),
        ("[train]\nsteps = 1" + "0" * 4_400, "not valid TOML"),
        ("a = " + "[" * 20_000, "not valid TOML"),
        ('[data]\ndir = "a\\u0000b"', "without control characters"),
        ('[data]\ndir = "a\\nb"', "without control characters"),
        ('[data]\ndir = "a\\u001b[2Jb"', "without control characters"),
        ("\n".join(f"[section{i}]" for i in range(100)), "And 92 more"),
    ],
)
def test_absurd_values_are_refused_in_one_short_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        parse_run_config(text, where="run.toml")
    assert len(str(refused.value)) < 4_000
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nn_layer = 1" + "0" * 30, r"model\.n_layer = 1000.*: must be a finite number"),
        ("[model]\nn_layer = 1001", r"model\.n_layer = 1001: must be at most 1000\."),
        ("[model]\nn_embd = 0x" + "f" * 50_000, "model.n_embd = "),
        ("[train]\nsteps = 1" + "0" * 18, r"train\.steps = 1000.*: must be at most"),
        ("[launch]\nranks_per_node = 1000000000", "launch.ranks_per_node = 1000000000: must be"),
        ("[optimizer]\nlr = 1e999", r"optimizer\.lr = inf: must be a finite number"),
        ("[optimizer]\nlr = nan", r"optimizer\.lr = nan: must be a finite number"),
        ("model = 1" + "0" * 4000, "is not a section"),
    ],
)
def test_values_that_no_machine_can_train_are_refused_at_once(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        parse(text)
    assert len(str(raised.value)) < 600 and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["9" * 30, "9" * 5000, "1e999", "[" * 5000, "0x" + "f" * 9000])
def test_absurd_overrides_are_refused_too(value: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.n_layer"):
        parse("", f"model.n_layer={value}")


def test_what_is_no_file_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load_run_config(tmp_path)
    (tmp_path / "huge.toml").touch()
    with (tmp_path / "huge.toml").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="Larger than"):
        load_run_config(tmp_path / "huge.toml")


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("profile_step = 101", "train.profile_step = 101 is above train.steps = 100: .* earlier"),
        ("profile_step = 5\nprofile_rank = 2", "train.profile_rank = 2: the ranks are 0 to 1, "),
    ],
)
def test_a_step_to_profile_that_no_rank_records_is_refused(profile: str, message: str) -> None:
    config = parse_run_config(f"[train]\n{profile}", where="run.toml")
    with pytest.raises(ConfigError, match=message):
        config.require_even(2)


@pytest.mark.parametrize("profile", ["profile_rank = 9", "profile_step = 100\nprofile_rank = 1"])
def test_a_step_to_profile_that_a_rank_records_is_taken(profile: str) -> None:
    parse_run_config(f"[train]\n{profile}", where="run.toml").require_even(2)


def test_an_override_of_several_lines_is_not_cut_silently() -> None:
    """The attack: the lines after the first one were ignored."""
    with pytest.raises(ConfigError, match="must be a whole number"):
        parse_run_config("", overrides=['train.steps=21\n[data]\ndir="/x"'], where="test")
