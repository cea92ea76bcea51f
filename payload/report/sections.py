"""The page's sections below the curves: a heading and a table or a drawing each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from payload.core.durations import in_words
from payload.formats.data_folder import DataMeta
from payload.report import compared_values as rows
from payload.report.markup import (
    NOTHING,
    Html,
    count,
    derived,
    figure,
    gib,
    join,
    loss,
    moment,
    percent,
    plain,
    seconds,
    table,
    tag,
    text,
    usd,
)
from payload.report.series import mean_times
from payload.report.source import Run
from payload.run_record.store_state import StoreState
from payload.run_record.stragglers import find_stragglers

_MOST_RANKS = 64
_MOST_SLOW = 8
_MOST_OPERATORS = 25
_WORD = {
    "start": "started",
    "resume": "continued",
    "failure": "failed",
    "restart": "started again",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "ended in failure",
}


def section(title: str, *content: Html, name: str) -> Html:
    """Return a section; one without content is left out."""
    if not any(content):
        return Html("")
    return tag("section", join([tag("h2", title), *content]), class_=name)


def tiles(run: Run) -> Html:
    """Return the run's main numbers."""
    found = run.summary

    def of(key: str, form: Callable[[Any], str]) -> Html:
        return figure(found.get(key), form, f"summary.json#{key}", run=run.run_id)

    named: list[tuple[str, Html, str]] = [
        ("validation loss", of("final_val_loss", loss), _best_note(run)),
        ("training loss", of("final_loss", loss), join(["from ", of("first_loss", loss)])),
        ("tokens/s", of("tokens_per_s", count), "median step"),
    ]
    if found.get("mfu") is not None:
        named.append(("MFU", of("mfu", percent), "of the measured peak"))
    named.append(("wall time", of("wall_s", in_words), join([of("tokens", count), " tokens"])))
    if found.get("cost_usd") is not None:
        per_million = join([of("usd_per_million_tokens", usd), " per M tokens"])
        named.append(("cost", of("cost_usd", usd), per_million))
    return tag(
        "dl",
        join(
            tag("div", join([tag("dt", name), tag("dd", value), tag("small", note)]))
            for name, value, note in named
        ),
        class_="tiles",
    )


def _best_note(run: Run) -> str:
    best = run.summary.get("best_val_loss")
    if best is None:
        return "not evaluated"
    return join(["best ", figure(best, loss, "summary.json#best_val_loss", run=run.run_id)])


def comparison(runs: Sequence[Run]) -> Html:
    """Return the runs' results beside each other, the best of each row marked."""
    lines = []
    for row in rows.COMPARED:
        if all(run.summary.get(row.key) is None for run in runs):
            continue
        best = rows.best_places(row, runs)
        cells = [
            figure(run.summary.get(row.key), row.form, f"summary.json#{row.key}", run=run.run_id)
            for run in runs
        ]
        marked = [tag("b", cell) if i in best else cell for i, cell in enumerate(cells)]
        lines.append([row.name, *marked])
    names = [run.run_id for run in runs]
    results = table(["", *names], lines, numbers=True)
    settings = [
        [each.name, *(_setting(each, run, i) for i, run in enumerate(runs))]
        for each in rows.different(runs)
    ]
    differing = table(["setting", *names], settings, numbers=True) if settings else Html("")
    return section("Compared", results, differing, name="compared")


def _setting(each: rows.Setting, run: Run, place: int) -> Html:
    return figure_or_none(each.values[place], f"run.toml#{each.name}", run=run)


def figure_or_none(value: object, source: str, *, run: Run) -> Html:
    """Return a setting, of which `none` is a value like others."""
    return tag(
        "code",
        text(plain(value)),
        class_="figure",
        data_source=source,
        data_run=run.run_id,
        data_text=plain(value),
    )


def events(run: Run) -> Html:
    """Return what happened, with the time since the start."""
    found = run.state.get("events", ())
    if not found:
        return Html("")
    began = found[0].time_unix
    lines = [
        [
            f"+{in_words(max(0.0, event.time_unix - began))}",
            tag("span", text(_WORD[event.kind]), class_=f"event {event.kind}"),
            event.text,
        ]
        for event in found[-30:]
    ]
    return table(["after", "what", "in its own words"], lines)


def where_time_went(run: Run) -> Html:
    """Return one bar for the whole of the run's time."""
    parts = [part for part in time_parts(run) if part[1] > 0]
    whole = sum(value for _, value, _ in parts)
    if whole <= 0:
        return Html("")
    # Lengths are numbers of ours, so they may stand in a style.
    bar = join(
        Html(f'<i class="{kind}" style="flex-grow:{value / whole:.5f}"></i>')
        for kind, value, _ in parts
    )
    legend = join(
        tag(
            "li",
            join(
                [
                    Html(f'<i class="{kind}"></i>'),
                    f"{words} ",
                    derived(value, in_words, f"time.{kind}", run=run.run_id),
                    tag("small", f" {percent(value / whole)}"),
                ]
            ),
        )
        for kind, value, words in parts
    )
    return join([tag("div", bar, class_="bar"), tag("ul", legend, class_="legend")])


def time_parts(run: Run) -> list[tuple[str, float, str]]:
    """Return what the run's time was spent on: a name, seconds, and words."""
    steps = run.steps
    in_steps = sum(row["step_time_s"] for row in steps)
    data = sum(row["data_time_s"] for row in steps)
    waiting = sum(row["sync_time_s"] for row in steps)
    start = sum(run.summary.get("start_s", {}).values())
    spent = run.state.get("spent_s") or run.summary.get("wall_s") or 0.0
    return [
        ("compute", max(0.0, in_steps - data - waiting), "computing steps"),
        ("wait", waiting, "waiting for gradients"),
        ("data", data, "reading data"),
        ("start", start, "the last start"),
        ("other", max(0.0, spent - in_steps - start), "evaluations, checkpoints, restarts"),
    ]


def ranks(run: Run) -> Html:
    """Return the mean time of each rank's parts of a step, and who was slow."""
    means = mean_times(run)
    if means is None:
        return Html("")
    of = {
        "data": means.data,
        "forward": means.forward,
        "backward": means.backward,
        "waiting": means.wait,
        "checkpoint": means.checkpoint,
    }
    shown = range(len(means.wait))
    note = Html("")
    if len(shown) > _MOST_RANKS:
        work = means.work()
        shown = range(0)
        slowest = sorted(range(len(work)), key=lambda rank: -work[rank])[:_MOST_RANKS]
        note = tag("p", f"The {_MOST_RANKS} slowest of {len(work)} ranks.", class_="note")
        order: Sequence[int] = slowest
    else:
        order = shown
    lines = [
        [
            f"rank {rank}",
            *(
                derived(values[rank], seconds, f"ranks.{part}.{rank}", run=run.run_id)
                for part, values in of.items()
            ),
        ]
        for rank in order
    ]
    made = table(["mean of a step", *of], lines, numbers=True)
    slow = [
        tag("p", text(each.words()), class_="warning")
        for each in find_stragglers(run.steps)[-_MOST_SLOW:]
    ]
    return join([*slow, made, note])


def cost(run: Run) -> Html:
    """Return time and money against what the plan predicted."""
    lines = [
        [name, measured, predicted, difference]
        for name, measured, predicted, difference in _predictions(run)
    ]
    if not lines:
        return Html("")
    note = Html("")
    if run.plan is not None and run.plan.arithmetic.step_s is None:
        note = tag(
            "p",
            text(
                "The plan had no prediction of the time: the nodes' peak was not measured before "
                "the start (preflight does it on a cluster)."
            ),
            class_="note",
        )
    return section(
        "Cost and prediction",
        table(["", "measured", "predicted by the plan", ""], lines, numbers=True),
        note,
        name="cost",
    )


def _predictions(run: Run) -> Iterator[tuple[str, Html, Html, Html]]:
    numbers = run.plan.arithmetic if run.plan else None
    found, name = run.summary, run.run_id
    hourly = run.inventory.hourly_usd() if run.inventory else None
    step_s = numbers.step_s if numbers else None
    speed = numbers.tokens_per_step / step_s if numbers and step_s else None
    per_million = hourly * 1e6 / 3600 / speed if hourly and speed else None
    measured = found.get("tokens_per_s")
    if measured is not None:
        yield (
            "tokens/s",
            figure(measured, count, "summary.json#tokens_per_s", run=name),
            derived(speed, count, "plan.tokens_per_s", run=name),
            _difference(measured, speed),
        )
    if numbers and measured:
        actual = numbers.tokens_per_step / measured
        yield (
            "a step",
            derived(actual, seconds, "step_s", run=name),
            figure(step_s, seconds, "plan.json#arithmetic.step_s", run=name),
            _difference(actual, step_s),
        )
    if run.steps and numbers:
        peak = max(row["rss_bytes"] for row in run.steps)
        yield (
            "memory of rank 0",
            derived(peak, gib, "peak_rss", run=name),
            figure(
                numbers.memory_bytes_per_rank,
                gib,
                "plan.json#arithmetic.memory_bytes_per_rank",
                run=name,
            ),
            _difference(peak, numbers.memory_bytes_per_rank),
        )
    if found.get("cost_usd") is not None:
        tokens = found.get("tokens") or 0
        planned = per_million * tokens / 1e6 if per_million and tokens else None
        yield (
            "dollars",
            figure(found["cost_usd"], usd, "summary.json#cost_usd", run=name),
            derived(planned, usd, "plan.usd", run=name),
            _difference(found["cost_usd"], planned),
        )
        yield (
            "dollars per million tokens",
            figure(
                found.get("usd_per_million_tokens"),
                usd,
                "summary.json#usd_per_million_tokens",
                run=name,
            ),
            derived(per_million, usd, "plan.usd_per_million_tokens", run=name),
            _difference(found.get("usd_per_million_tokens"), per_million),
        )


def _difference(measured: float | None, predicted: float | None) -> Html:
    if not measured or not predicted:
        return Html("")
    return text(f"{measured / predicted - 1:+.0%}".replace("%", " %"))


def store(run: Run) -> Html:
    """Return what of the run is in its store, by its last word in state.json."""
    found: StoreState | None = run.state.get("store")
    if found is None:
        return Html("")

    def of(key: str, form: Callable[[Any], str]) -> Html:
        return figure(getattr(found, key), form, f"state.json#store.{key}", run=run.run_id)

    age_s = found.updated_unix - found.sent_unix if found.sent_unix else None
    lines = [
        ["address", of("address", str)],
        ["newest checkpoint", of("checkpoint", str)],
        ["has all of the run", "yes" if found.is_drained else "no"],
        ["sent", of("sent_bytes", _bytes)],
        ["waiting on the head's disk", of("waiting_bytes", _bytes)],
        ["last upload before that word", derived(age_s, in_words, "store.age_s", run=run.run_id)],
        ["attempts that failed", of("failures", count)],
    ]
    problem = tag("p", text(found.problem), class_="warning") if found.problem else Html("")
    return section("Store", problem, table(["", ""], lines), name="store")


def profile(run: Run) -> Html:
    """Return the operators of the step that was profiled."""
    found = run.profile
    if found is None:
        return Html("")
    source = "profile/operators.json#operators"
    lines = [
        [
            tag("code", each.name),
            figure(each.calls, count, f"{source}.{place}.calls", run=run.run_id),
            figure(each.self_s, seconds, f"{source}.{place}.self_s", run=run.run_id),
            percent(each.self_s / found.whole_s) if found.whole_s else "",
            figure(each.total_s, seconds, f"{source}.{place}.total_s", run=run.run_id),
        ]
        for place, each in enumerate(found.operators[:_MOST_OPERATORS])
    ]
    note = f"Step {found.step} on rank {found.rank}. The trace is profile/{found.trace}."
    return section(
        "Profile of a step",
        table(["operator", "calls", "self", "share", "total"], lines, numbers=True),
        tag("p", note, class_="note"),
        name="profile",
    )


def samples(run: Run) -> Html:
    """Return what the model wrote before and after."""
    blocks = []
    for each in run.samples:
        sides = [
            tag("div", join([tag("h4", name), tag("pre", written)]))
            for name, written in (("before", each.before), ("after", each.after))
            if written is not None
        ]
        prompt = tag("p", tag("code", each.prompt), class_="prompt")
        blocks.append(
            tag("div", join([prompt, tag("div", join(sides), class_="sides")]), class_="sample")
        )
    return section("Samples", *blocks, name="samples")


def data_card(run: Run) -> Html:
    """Return what the run was trained on."""
    meta = run.data
    where = str(run.data_folder)
    if meta is None:
        note = tag("p", f"{where} is not on this machine, so its card is not here.")
        return section("Data", note, name="data")
    lines = [["folder", tag("code", where)]]
    lines += [
        [name, figure(value, form, f"meta.json#{key}", run=run.run_id)]
        for name, key, value, form in _card(meta)
        if value not in (None, "")
    ]
    return section("Data", table(["", ""], lines), name="data")


def _card(meta: DataMeta) -> Iterator[tuple[str, str, Any, Callable[[Any], str]]]:
    yield "source", "source", meta.source, str
    yield "revision", "revision", meta.revision, str
    yield "task", "task", meta.task, str
    yield "training tokens", "train_tokens", meta.train_tokens, count
    yield "validation tokens", "val_tokens", meta.val_tokens, count
    yield "training documents", "train_documents", meta.train_documents, count
    yield "validation documents", "val_documents", meta.val_documents, count
    yield "skipped documents", "skipped_documents", meta.skipped_documents or None, count
    yield "text", "text_bytes", meta.text_bytes, _bytes
    yield "tokenizer", "tokenizer", meta.tokenizer, str
    yield "vocabulary", "vocab_size", meta.vocab_size, count
    yield "encoder", "encoder", meta.encoder, str
    yield "fingerprint", "fingerprint", meta.fingerprint, str


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"


def settings(run: Run) -> Html:
    """Return the settings that are not the defaults."""
    lines = [
        [
            tag("code", each.name),
            figure_or_none(each.values[0], f"run.toml#{each.name}", run=run),
            tag("code", text(plain(each.default)), class_="quiet"),
        ]
        for each in rows.changed([run])
    ]
    if not lines:
        note = tag("p", "Every setting is the default.")
        return section("Settings", note, name="settings")
    return section(
        "Settings that are not the default",
        table(["setting", "this run", "default"], lines),
        name="settings",
    )


def machine(run: Run) -> Html:
    """Return the nodes and the versions."""
    inventory = run.inventory
    found = Html("")
    if inventory is not None:
        lines = []
        for place, node in enumerate(inventory.nodes[:_MOST_RANKS]):
            source = f"inventory.json#nodes.{place}"
            lines.append(
                [
                    node.name,
                    node.machine_type or NOTHING,
                    node.zone or NOTHING,
                    figure(node.physical_cores, count, f"{source}.physical_cores", run=run.run_id),
                    figure(node.numa_domains, count, f"{source}.numa_domains", run=run.run_id),
                    figure(node.memory_gib, _memory, f"{source}.memory_gib", run=run.run_id),
                    figure(node.hourly_usd, usd, f"{source}.hourly_usd", run=run.run_id),
                ]
            )
        heads = ["node", "type", "zone", "cores", "NUMA domains", "memory", "$ an hour"]
        found = table(heads, lines, numbers=True)
    versions = [
        [name, figure(version, str, f"summary.json#versions.{name}", run=run.run_id)]
        for name, version in sorted(run.summary.get("versions", {}).items())
    ]
    made = table(["version of", ""], versions) if versions else Html("")
    peak = run.summary.get("peak_flops_per_s")
    note = Html("")
    if peak:
        value = figure(peak, _tflops, "summary.json#peak_flops_per_s", run=run.run_id)
        note = tag("p", join(["Measured peak of all ranks: ", value, "."]))
    return section("Machine and versions", found, note, made, name="machine")


def _memory(value: float) -> str:
    return f"{value:.4g} GiB"


def _tflops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s"


def heading_facts(run: Run) -> Html:
    """Return the small line under the run's name: when, where, what."""
    parts = []
    found = run.state.get("events") or ()
    began = found[0].time_unix if found else run.state.get("started_unix")
    if began:
        parts.append(text(moment(began)))
    if run.plan is not None:
        params = run.plan.arithmetic.params
        parts.append(
            join(
                [
                    figure(params, count, "plan.json#arithmetic.params", run=run.run_id),
                    " parameters",
                ]
            )
        )
    if run.summary:
        nodes = figure(run.summary["nodes"], count, "summary.json#nodes", run=run.run_id)
        size = figure(run.summary["world_size"], count, "summary.json#world_size", run=run.run_id)
        several = "" if run.summary["nodes"] == 1 else "s"
        ranks = " rank" if run.summary["world_size"] == 1 else " ranks"
        parts.append(join([nodes, f" node{several}, ", size, ranks]))
    return tag("p", join(parts, " · "), class_="facts")
