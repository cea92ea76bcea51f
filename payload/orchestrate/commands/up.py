"""`up`: preview, the operator's yes, and `pulumi up` until it is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from payload.core.errors import (
    CloudAuthError,
    CloudError,
    ConfigError,
    ExitCode,
    TeardownError,
    TileforgeError,
)
from payload.core.files import write_whole
from payload.core.regular_files import read_bytes
from payload.core.suggested_commands import command
from payload.core.validation.fields import checked
from payload.core.validation.json_text import parse_json
from payload.core.validation.records import build, check_schema
from payload.orchestrate.cloud.failures import (
    StackBusyError,
    StockOut,
    explain,
    problems_of,
    stock_out_of,
)
from payload.orchestrate.cloud.filestore import (
    MayDelete,
    billed_words,
    filestores_that_go,
    has_filestore,
    may_delete,
    refuse_another_region,
    zone_words,
)
from payload.orchestrate.cloud.firewall_drift import (
    INSTANCE,
    StackState,
    changes_metadata,
    machines_that_go,
    settle,
    stack_state,
)
from payload.orchestrate.cloud.google import Endpoints, Google
from payload.orchestrate.cloud.machine_status import (
    CLOCK_SLACK_S,
    MachinesThere,
    StoppedChoice,
    machines_there,
    places_in,
    see_to_stopped,
)
from payload.orchestrate.cloud.ownership import Ownership, ownership_of
from payload.orchestrate.cloud.pulumi import (
    Pulumi,
    Step,
    Update,
    cluster_name,
    name_of,
    settings,
    type_of,
)
from payload.orchestrate.cloud.pulumi_operations import Operations, orphans, remove_orphans
from payload.orchestrate.cloud.resources import FILESTORE, Resource
from payload.orchestrate.cloud.stack_outputs import (
    outputs_if_any,
    read_outputs,
    remember,
    remember_plan,
)
from payload.orchestrate.cloud.stack_update import (
    KEPT_VARIABLE,
    Additions,
    added_lines,
    hand_added,
    kept_metadata,
    reasons,
    refuse_another_project,
    remove_machines,
    use_kept_bucket,
)
from payload.orchestrate.commands.cluster_name_conflict import of_this_name, own_identity, take_over
from payload.orchestrate.commands.down import AtStake, at_stake
from payload.orchestrate.commands.sweep import destroy_and_look, project_of
from payload.orchestrate.runs.at_risk import cluster_warning, refuse_spot_without_bucket
from payload.orchestrate.ssh.keys import make_operator_key, operator_key_path
from payload.orchestrate.terminal.console import confirm, text_console
from payload.stack.cloud_names import CLOUD_NAME
from payload.stack.cloud_need import Spot, need_of, text_list
from payload.stack.cluster_files import cluster_path
from payload.stack.cluster_identity import known_cluster_identity, settle_cluster_identity

_UP = ("up", "--yes", "--skip-preview")
_EXISTS = ("Error 409", "alreadyExists", "already exists")
_CREATING = ("create", "create-replacement", "replace")
_NEEDS_STOP = "requires stopping it"

Saves = Callable[[Sequence[str], str, str], bool]
"""Collects the results on these machines before they end; False after a no. The other two are what
stays as it is otherwise, and the question."""


_ZONES_VERSION = 1
_FULL_HOURS = 6.0
"""How long a zone that had no machine free is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullZone:
    """A zone that had no machine free."""

    zone: str = checked(pattern=CLOUD_NAME, wanted="a zone")
    time_unix: float
    reason: str

    def describe(self, *, now_unix: float) -> str:
        """Return the zone with its reason and how long ago it was."""
        hours = max(0.0, now_unix - self.time_unix) / 3600
        return f"{self.zone} ({self.reason}, {hours:.1f} h ago)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullZones:
    """The file that keeps them between two commands: .cluster/NAME/zones.json."""

    zones: tuple[FullZone, ...] = ()

    @classmethod
    def load(cls, path: Path, *, now_unix: float) -> FullZones:
        """Return those of the last hours; none where the file is absent or damaged."""
        try:
            raw = parse_json(read_bytes(path), where=str(path))
            check_schema(raw, _ZONES_VERSION, where=str(path))
            known = build(cls, raw, where=str(path))
        except (OSError, TileforgeError):
            return cls()
        oldest = now_unix - _FULL_HOURS * 3600
        return cls(zones=tuple(each for each in known.zones if oldest < each.time_unix <= now_unix))

    def without(self, zone: str) -> FullZones:
        """Return the others."""
        return FullZones(zones=tuple(each for each in self.zones if each.zone != zone))

    def save(self, path: Path) -> None:
        """Replace the file."""
        write_whole(path, json.dumps({"schema_version": _ZONES_VERSION, **asdict(self)}, indent=2))


@dataclass(slots=True, kw_only=True)
class Builder:
    """Builds the cluster, or brings it up to date."""

    operations: Operations
    google: Callable[[], Google]
    """Made when it is needed: its libraries take a second to import."""
    identity: str
    """The cluster's own: what carries it and is not in the stack was left by a broken `up`."""
    zones: Sequence[str]
    """The config's other zones, to try in turn; empty without --next-zone."""
    spot: Spot
    there: Sequence[str]
    """Machines that were up before."""
    save: Saves
    may_delete: MayDelete
    full_zones: Path
    """The memory of zones that had no machine free."""
    replaces: Sequence[str] = ()
    """Words that let the first attempt replace machines."""
    now_unix: Callable[[], float] = time.time
    _left: list[str] = field(default_factory=list)
    _cleared: bool = False
    _rebuilt: set[str] = field(default_factory=set)

    _zone: str = ""
    """The one that the next attempt builds in; empty without --next-zone."""
    _tried: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = list(self.zones[1:])
        self._zone = self.zones[0] if self.zones else ""

    def build(self) -> Update:
        """Run `pulumi up` until it succeeds. Raises the error that it amounts to otherwise.

        All nodes are in one zone, so another one ends the machines that were there: that is asked.
        """
        more, self.replaces = list(self.replaces), ()
        self._pass_over_full_zones()
        while True:
            update = self.operations.run(*_UP, *more)
            if update.status == 0:
                return update
            more = []
            stock_out = stock_out_of(update, spot=self.spot != "false")
            drifted = drifted_machines(update, done=self._rebuilt)
            if stock_out is not None:
                self._next_zone(update, stock_out)
            elif drifted:
                self._ask_to_rebuild(update, drifted)
                more = replacing(step.urn for step in drifted)
            elif self._cleared or not _says_exists(update) or not self._clear():
                raise self._failed(update)

    def settle_firewall(self, update: Update) -> None:
        """Compare the firewall with the program's. Raises CloudError when a rule stays open."""
        settle(self.google(), update, again=self.build, talk=self.operations.talk)

    def _pass_over_full_zones(self) -> None:
        """Begin in the first zone that was not full in the last hours.

        With machines up, or where all zones were full, the config's order holds.
        """
        if not self.zones or self.there:
            return
        now = self.now_unix()
        full = {each.zone: each for each in FullZones.load(self.full_zones, now_unix=now).zones}
        zone = next((each for each in self.zones if each not in full), None)
        if zone is None or zone == self._zone:
            return
        passed = [full[each] for each in self.zones[: self.zones.index(zone)]]
        self.operations.talk.print(
            f"--next-zone: the cluster goes to {zone}, as these were full within the last "
            f"{_FULL_HOURS:g} h: " + ", ".join(each.describe(now_unix=now) for each in passed)
        )
        self._left = [each for each in self.zones if each != zone and each not in full]
        self._move(zone)

    def _note_full(self, stock_out: StockOut) -> None:
        """Keep for the next `up` that the zone has no machine now."""
        now = self.now_unix()
        found = FullZone(zone=self._zone, time_unix=now, reason=stock_out.shown_reason)
        others = FullZones.load(self.full_zones, now_unix=now).without(self._zone)
        FullZones(zones=(*others.zones, found)).save(self.full_zones)

    def _next_zone(self, update: Update, stock_out: StockOut) -> None:
        if self.zones:
            self._note_full(stock_out)
            self._tried.append(self._zone)
        if not self._left:
            if self.spot != "auto":
                raise self._failed(update)
            self._build_on_demand(update, stock_out)
            return
        # One that the error says has capacity goes first; else the order of the config.
        zone = min(self._left, key=lambda z: (z not in stock_out.free, self.zones.index(z)))
        self.operations.talk.print(
            f"{stock_out.describe()}\n--next-zone: the cluster goes to {zone} now"
        )
        question = f"End these machines and build in {zone}?"
        if not self.save(self.there, "the cluster stays in its zone", question):
            raise self._failed(update)
        self._left.remove(zone)
        self.there = []
        self._move(zone)

    def _build_on_demand(self, update: Update, stock_out: StockOut) -> None:
        """Continue with on-demand machines, once, in the zones of the config from the first on."""
        self.operations.talk.print(stock_out.describe())
        question = "End these machines and build on-demand ones?"
        if not self.save(self.there, "the machines stay as they are", question):
            raise self._failed(update)
        self.operations.talk.print(
            "spot: auto: no spot machine is free, so the machines are on demand from now on, in "
            "the stack's config too; before the next cluster: pulumi config set spot auto"
        )
        self.operations.pulumi.ask("config", "set", "spot", "false")
        self.spot, self.there, self._tried = "false", [], []
        # Those zones had no spot machine.
        FullZones().save(self.full_zones)
        self._left = list(self.zones[1:])
        if self.zones and self._zone != self.zones[0]:
            self._move(self.zones[0])

    def _move(self, zone: str) -> None:
        """Put `zone` first in the stack's config, where the cluster program reads it."""
        self._zone = zone
        self._set_zones([zone, *(each for each in self.zones if each != zone)])

    def _set_zones(self, order: Sequence[str]) -> None:
        for place, name in enumerate(order):
            self.operations.pulumi.ask("config", "set", "--path", f"zones[{place}]", name)

    def restore_zones(self) -> None:
        """Put the config's order back after a failure, unless a machine is in another zone now."""
        if not self.zones or self._zone == self.zones[0]:
            return
        with suppress(TileforgeError):  # the error that `up` ends with says more
            if not stack_state(self.operations.pulumi).machines:
                self._set_zones(self.zones)

    def _ask_to_rebuild(self, update: Update, drifted: Sequence[Step]) -> None:
        names = [name_of(step.urn) for step in drifted]
        for step in drifted:
            what = ", ".join(step.detailed or step.diffs or ("a setting",))
            self.operations.talk.print(
                f"machine {name_of(step.urn)}: {what} was changed outside Pulumi, and Google "
                "changes it on a stopped machine only"
            )
        question = f"End {', '.join(names)} and build it again?"
        if not self.save(names, "it stays as it is", question):
            raise self._failed(update)
        self._rebuilt |= {step.urn for step in drifted}

    def _clear(self) -> bool:
        """Remove what Google has of the cluster and the stack has not; False for nothing."""
        operations = self.operations
        google, state = self.google(), stack_state(operations.pulumi)
        found = orphans(google, state, self.identity)
        self._cleared = True
        data = [each.name for each in found if each.kind == FILESTORE]
        if not self.may_delete(data, kept="it stays"):
            return False
        return bool(found) and remove_orphans(
            google,
            operations.cluster,
            found,
            assume_yes=operations.assume_yes,
            talk=operations.talk,
        )

    def _failed(self, update: Update) -> TileforgeError:
        error = explain(update, spot=self.spot != "false")
        if len(self._tried) > 1 and stock_out_of(update, spot=self.spot != "false") is not None:
            tried = ", ".join(self._tried)
            error = with_words(error, f"Zones of the config that were tried: {tried}")
        if self.spot != "false" and error.exit_code == ExitCode.NO_CAPACITY:
            words = "Those were spot machines; for on-demand ones: pulumi config set spot false"
            error = with_words(error, words)
        return error


def replacing(urns: Iterable[str]) -> list[str]:
    """Return the words that let Pulumi replace these resources."""
    return [word for urn in urns for word in ("--replace", urn)]


def creates_anything(preview: Update) -> bool:
    """Return whether `pulumi up` would make anything in Google Cloud."""
    made = (step.urn for step in preview.steps if step.op in _CREATING)
    return any(type_of(urn).startswith("gcp:") for urn in made)


def drifted_machines(update: Update, *, done: set[str]) -> list[Step]:
    """Return the failed updates of machines that only a stopped machine can take."""
    stuck = {each.urn for each in problems_of(update) if _NEEDS_STOP in each.message}
    return [
        step
        for step in update.failures
        if step.urn in stuck - done and type_of(step.urn) == INSTANCE
    ]


def with_words(error: TileforgeError, words: str) -> TileforgeError:
    """Return the error with another sentence and the same exit code."""
    again = TileforgeError(str(error), fix=words)
    again.exit_code = error.exit_code
    return again


def remaining(machines: Sequence[str], preview: Update) -> str:
    """Return in words which machines are there, and what they cost an hour as far as is known."""
    if not machines:
        return "no machine is there"
    prices = _node_prices(preview)
    usd = sum(prices.get(name, 0.0) for name in machines)
    cost = f", ${usd:.2f}/h" if usd else ""
    return f"{len(machines)} machine(s) are there{cost}: {', '.join(machines)}"


def unknown_machines(error: TileforgeError, google: Google, cluster: str, preview: Update) -> str:
    """Return the words for a failure after which the machines cannot be listed."""
    usd = sum(_node_prices(preview).values())
    cost = f"cost ${usd:.2f}/h" if usd else "cost an unknown price"
    return (
        f"it is unknown which machines exist ({str(error).rstrip('.')}); if all do, they {cost} "
        f"until their lifetime ends. Look: sweep --cluster {cluster} --project {google.project}"
    )


def _node_prices(update: Update) -> dict[str, float]:
    """Return the prices in the stack's outputs that a preview expects; what is damaged is left."""
    inventory = update.outputs.get("inventory")
    nodes = inventory.get("nodes") if isinstance(inventory, dict) else None
    return {
        each["name"]: float(each["hourly_usd"])
        for each in (nodes if isinstance(nodes, list) else [])
        if isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and type(each.get("hourly_usd")) in (int, float)
    }


def _says_exists(update: Update) -> bool:
    return any(word in each.message for each in problems_of(update) for word in _EXISTS)


_FORCE = "up --without-collect"
_WORDS = {"kept": "nothing was built", "force": _FORCE}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of `up`."""

    stack: str | None
    runs_dir: Path
    next_zone: bool
    keep_on_failure: bool
    without_collect: bool
    take_over: str | None
    delete_filestore: list[str]
    """Names of Filestore instances that may be deleted with their data."""
    stopped: StoppedChoice | None
    """Treatment of stopped machines; None to ask."""
    results_may_be_lost: bool
    """Build spot machines without a bucket, too."""
    dry_run: bool
    yes: bool


def up(options: UpOptions, env: Mapping[str, str]) -> int:
    """Build the cluster, or bring it up to date."""
    talk, folder = text_console(stderr=True), Path.cwd()
    pulumi = Pulumi(env, folder=folder, stack=options.stack)
    known = settings(pulumi)
    zones = text_list(known.get("zones")) if options.next_zone else []
    if options.next_zone and len(zones) < 2:
        raise ConfigError(
            f"--next-zone: the config has {len(zones)} zone(s). Give more, in the order to try: "
            "pulumi config set --path 'zones[1]' ZONE"
        )
    may_lose = options.results_may_be_lost or options.dry_run
    refuse_spot_without_bucket(known, accepted=may_lose)
    cluster = cluster_name(pulumi, known)
    operations = Operations(
        pulumi=pulumi, cluster=cluster, folder=folder, talk=talk, assume_yes=options.yes
    )
    before = stack_state(pulumi)
    there = before.machines
    # Without a project the preview refuses the config.
    if known.get("project"):
        refuse_another_project(before, str(known["project"]))

    def google() -> Google:
        project = project_of(known.get("project"), cluster, env, folder=folder)
        return Google(project, endpoints=Endpoints.from_env(env))

    may_delete_data = partial(may_delete, named=options.delete_filestore)
    _make_key(known, cluster, there=there, talk=talk)
    own_identity(folder, cluster, told=before.identities)
    identity = settle_cluster_identity(folder, cluster, told=before.identities)

    def of_others() -> Sequence[Resource]:
        # With other credentials than Pulumi's, nothing that is built could be removed.
        google().check_access()
        own = ownership_of(before, identity, project=google().project)
        return of_this_name(google(), cluster, own, take_over=options.take_over, talk=talk)

    # Before a machine is started that the stack lists: it may be another cluster's by now.
    others = of_others() if before.parts else ()
    added = _see_additions(pulumi, known, cluster, google, there=there)
    use_kept_bucket(
        pulumi,
        known,
        cluster,
        before,
        google,
        identity=identity,
        folder=folder,
        dry_run=options.dry_run,
        talk=talk,
    )
    replaces: list[str] = []
    places = places_in(before, project=google().project) if before.parts else {}
    if places:
        replaces = replacing(
            see_to_stopped(
                google(),
                places,
                choice=options.stopped,
                dry_run=options.dry_run,
                assume_yes=options.yes,
                talk=talk,
            )
        )
    preview = operations.preview(*replaces)
    refuse_another_region(preview, need_of(known).region)
    if not before.parts and creates_anything(preview):
        others = of_others()
    going = machines_that_go(preview) if there else []
    for line in reasons(preview, going):
        talk.print(line)
    if there and changes_metadata(preview):
        talk.print(
            "machines that are up keep the operator's keys that they booted with; others reach "
            "only machines that are built from now on"
        )
    results = _Results(pulumi, options, env, added=added, talk=talk)
    for line in added_lines(added, going):
        talk.print(line)
    stake = results.look(going)
    warning = cluster_warning(known)
    if warning is not None:
        talk.print(f"warning: {warning}")
    if options.dry_run:
        talk.print("dry run: nothing was built")
        return ExitCode.OK
    if stake is not None:
        stake.refuse_losses(**_WORDS)
    if not confirm("Build this?", assume_yes=options.yes) or not may_delete_data(
        filestores_that_go(preview), kept="nothing was built"
    ):
        talk.print("nothing was built")
        return ExitCode.OK
    _refuse_if_changed(pulumi, before, kept="nothing was built")
    if others and not take_over(
        google(), others, cluster=cluster, may_delete=may_delete_data, talk=talk
    ):
        talk.print("nothing was built")
        return ExitCode.OK
    remember_plan(cluster, known, folder=folder)
    if stake is not None:
        stake.bring_home(env, **_WORDS)
    builder = Builder(
        operations=operations,
        google=google,
        identity=identity,
        zones=zones,
        spot=need_of(known).spot,
        there=there,
        save=results.save,
        may_delete=may_delete_data,
        full_zones=cluster_path(folder, cluster, "zones.json"),
        replaces=replaces,
    )
    began_unix = time.time()
    try:
        update = builder.build()
    except StackBusyError:
        # What is there now is being built by somebody else.
        raise
    except TileforgeError as error:
        if there or options.keep_on_failure:
            last = with_words(error, _how_to_remove(pulumi))
        else:
            last = _take_back(
                error,
                operations,
                google(),
                preview,
                since_unix=began_unix,
                has_data=has_filestore(before),
            )
        builder.restore_zones()
        raise last from None
    except KeyboardInterrupt:
        what = _what_is_there(operations, google(), preview)
        talk.print(f"up was interrupted: {what}. {_how_to_remove(pulumi)}")
        builder.restore_zones()
        raise
    return _conclude(pulumi, builder, update, options, talk=talk)


def _conclude(
    pulumi: Pulumi,
    builder: Builder,
    update: Update,
    options: UpOptions,
    *,
    talk: Console,
) -> int:
    """Remember the cluster, look at its firewall, and print what is next."""
    outputs = read_outputs(pulumi)
    remember(outputs, folder=Path.cwd(), made_bucket=stack_state(pulumi).bucket)
    # Before the firewall: whatever is found there, the machines are billed.
    talk.print(
        f"cluster {outputs.inventory.cluster}: {len(outputs.inventory.nodes)} node(s), "
        f"{outputs.price_and_end()}; remove it: {command('orchestrate', 'down')}"
    )
    if words := zone_words(update, outputs.inventory.head.zone):
        talk.print(words)
    builder.settle_firewall(update)
    name = f"stack:{options.stack}" if options.stack else "stack"
    talk.print(
        "check its nodes: "
        + command("orchestrate", "preflight", "--inventory", name, "--wait", "20")
    )
    return ExitCode.OK


def _what_is_there(operations: Operations, google: Google, preview: Update) -> str:
    cluster = operations.cluster
    try:
        state = stack_state(operations.pulumi)
        own = _own(operations, state, google)
        there = machines_there(google, own, state, since_unix=time.time())
    except TileforgeError as error:
        return unknown_machines(error, google, cluster, preview)
    return remaining(there.names, preview)


def _own(operations: Operations, state: StackState, google: Google) -> Ownership:
    identity = known_cluster_identity(operations.folder, operations.cluster)
    return ownership_of(state, identity, project=google.project)


def _how_to_remove(pulumi: Pulumi) -> str:
    return (
        f"{billed_words(pulumi)}What was built before stays and is billed until its lifetime ends: "
        f"look with `pulumi stack`, remove it with: {command('orchestrate', 'down')}"
    )


class _Results:
    """Results on the machines of a cluster that is up, before some of them are removed."""

    def __init__(
        self,
        pulumi: Pulumi,
        options: UpOptions,
        env: Mapping[str, str],
        *,
        added: Sequence[Additions],
        talk: Console,
    ) -> None:
        self._added = added
        self._pulumi = pulumi
        self._options = options
        self._env = env
        self._talk = talk

    def look(self, going: Sequence[str]) -> AtStake | None:
        """Say which machines go, and what is to be collected first; None where nothing is."""
        if not going:
            return None
        self._talk.print(
            f"this ends {len(going)} machine(s), with all that is on them: {', '.join(going)}"
        )
        outputs = outputs_if_any(self._pulumi)
        if outputs is None or self._options.without_collect:
            return None
        stake = at_stake(
            outputs.inventory.cluster,
            outputs,
            self._env,
            folder=Path.cwd(),
            runs_dir=self._options.runs_dir,
            talk=self._talk,
        )
        self._talk.print(f"to collect first: {stake.names()}")
        return stake

    def save(self, going: Sequence[str], kept: str, question: str) -> bool:
        """Look, ask, and collect; False after a no. Raises when something would be lost."""
        for line in added_lines([each for each in self._added if each.machine in going], going):
            self._talk.print(line)
        stake = self.look(going)
        if not going or self._options.without_collect:
            return True
        if stake is not None:
            stake.refuse_losses(kept=kept, force=_FORCE)
        if not confirm(question, assume_yes=self._options.yes):
            return False
        if stake is not None:
            stake.bring_home(self._env, kept=kept, force=_FORCE)
        return True


def _see_additions(
    pulumi: Pulumi,
    known: Mapping[str, Any],
    cluster: str,
    google: Callable[[], Google],
    *,
    there: Sequence[str],
) -> list[Additions]:
    """Return what people have added to the machines, and tell the cluster program to leave it."""
    # Without a project the preview refuses the config.
    if not there or not known.get("project"):
        return []
    labels = {label.partition("=")[0] for label in text_list(known.get("labels"))}
    added = hand_added(google(), cluster, machines=there, labels=labels)
    pulumi.tell_program(**{KEPT_VARIABLE: kept_metadata(added)})
    return added


def _make_key(known: dict[str, Any], cluster: str, *, there: Sequence[str], talk: Console) -> None:
    """Make the operator's key, whose public half the cluster program reads, unless there is one.

    Raises ConfigError when machines are up: they know another key, and a new one ends them. So too
    for a public half alone, or of another key, as may come with the folder: it would log in.
    """
    if known.get("operatorPublicKeyFile") or known.get("accessMode") == "oslogin":
        return
    path = operator_key_path(Path.cwd(), cluster=cluster)
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        if path.exists():
            is_ours = read_bytes(public).split()[:2] == make_operator_key(path).encode().split()[:2]
        else:
            is_ours = bool(there)
        if is_ours:
            return
        raise ConfigError(
            f"{public}: its private half is not here, so somebody else may have it. Move it away "
            f"for a new key; or, if it is yours: pulumi config set operatorPublicKeyFile {public}"
        )
    if there and not path.exists():
        raise ConfigError(
            f"{path}: the key that opens cluster {cluster} is not here, and its {len(there)} "
            "machine(s) know no other. Bring it from where the cluster was built; or remove the "
            f"cluster and build it from here: {command('orchestrate', 'down')}"
        )
    write_whole(public, f"{make_operator_key(path)}\n")
    talk.print(f"made the key that opens the cluster: {path}")


def _refuse_if_changed(pulumi: Pulumi, before: StackState, *, kept: str) -> None:
    """Raise ConfigError when somebody else was at work while the operator was thinking."""
    if stack_state(pulumi) != before:
        raise ConfigError(
            f"the stack has changed meanwhile, so {kept}. Repeat: " + command("orchestrate", "up")
        )


def _take_back(
    error: TileforgeError,
    operations: Operations,
    google: Google,
    preview: Update,
    *,
    since_unix: float,
    has_data: bool,
) -> TileforgeError:
    """Remove what an `up` without machines has built before it failed; the error to end with.

    It began at `since_unix`. What it has built is what Google has: a machine whose creation was
    accepted is not in the stack's state where the answer to a later request was a refusal. With
    `has_data` the stack had a Filestore instance before: the machines alone are removed.
    """
    pulumi, talk = operations.pulumi, operations.talk
    try:
        after = stack_state(pulumi)
        try:
            own = _own(operations, after, google)
            found = machines_there(google, own, after, since_unix=since_unix)
        except (CloudError, CloudAuthError) as blind:
            if not after.machines:
                words = unknown_machines(blind, google, operations.cluster, preview)
                remove = f"; remove them: {command('orchestrate', 'down')}"
                return TeardownError(str(with_words(error, f"And {words}{remove}")))
            found = MachinesThere(names=after.machines, older=())
        there = found.names
        if found.older:
            # Another state may know them, and results may be on them.
            words = f"Not of this `up`, and left: {', '.join(found.older)}. "
            words += _how_to_remove(pulumi)
            return with_words(error, words)
        if not there:
            rest = command("orchestrate", "down")
            words = f"No machine was built. {billed_words(pulumi)}Remove the rest with: {rest}"
            return with_words(error, words)
        talk.print(f"error: {error}\nbuilt before: {', '.join(there)}")
        if not confirm("Remove what was built?", assume_yes=operations.assume_yes):
            return with_words(error, _how_to_remove(pulumi))
        _refuse_if_changed(pulumi, after, kept="nothing was removed")
        if has_data:
            remove_machines(google, after)
            rest = command("orchestrate", "down")
            words = "The machines that were built before are removed again"
            return with_words(error, f"{words}. {billed_words(pulumi)}Remove the rest with: {rest}")
        destroy_and_look(
            operations,
            google,
            state=after,
            steps=2,
            # There was none before: nothing is on one that this `up` has made.
            may_go=lambda each: (each.created_unix or 0.0) >= since_unix - CLOCK_SLACK_S,
        )
    except KeyboardInterrupt:
        talk.print(f"up was interrupted. {_how_to_remove(pulumi)}")
        raise
    except TileforgeError as left:
        words = f"And what was built before is not all removed: {left}"
        return TeardownError(str(with_words(error, words)))
    return with_words(error, "What was built before is removed again")
