"""Steps of an operation: refresh, create, update, replace, delete; each updates the state."""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.engine import provider
from tests.engine.fake_pulumi.backend import Stack
from tests.engine.fake_pulumi.events import Events

Document = dict[str, Any]
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""Placeholder for an unknown value in a preview (pulumi.runtime.rpc)."""
STACK = "pulumi:pulumi:Stack"
_BUCKET = "storage/bucket:Bucket"
_AT_ONCE = 10


class StoppedError(Exception):
    """A step failed, or the operator interrupted: no other step starts."""


class FailedStepError(StoppedError):
    """This step failed, and its events are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a resource, from its registration."""

    ignore: Sequence[str] = ()
    """Paths of inputs that keep their current value."""
    replace_on: Sequence[str] = ()
    trigger: Any = None
    delete_first: bool = False
    """True to delete a resource before its replacement is created."""


class Deployment:
    """The resources of a stack during one operation."""

    def __init__(
        self, stack: Stack, events: Events, sender: provider.Sender, *, is_preview: bool
    ) -> None:
        self.events = events
        self.is_preview = is_preview
        self.sender = sender
        self._stack = stack
        resources, self._pending = stack.read()
        self.old: dict[str, Document] = {
            each["urn"]: each for each in resources if not each.get("delete")
        }
        self._replaced: list[Document] = [each for each in resources if each.get("delete")]
        """Resources whose replacements exist, to be deleted at the end."""
        self.new: dict[str, Document] = {}
        self._live: dict[str, Document] = {}
        self.replaced_by_hand: set[str] = set()
        """URNs of `--replace`."""
        self._gone: set[str] = set()
        """Resources deleted in this operation that will be created again."""
        self._lock = threading.RLock()
        self._replacing = threading.Lock()
        self.failed = False
        self.interrupted = False

    @property
    def stopped(self) -> bool:
        """Return whether no other step may start."""
        return self.failed or self.interrupted

    def save(self) -> None:
        """Write the state."""
        if self.is_preview:
            return
        with self._lock:
            rest = [each for urn, each in self.old.items() if urn not in self.new]
            self._stack.save([*self.new.values(), *rest, *self._replaced], self._pending)

    def refresh(self) -> None:
        """Read every resource; forget those that are gone. Raises StoppedError."""
        for each in list(self.old.values()):
            self.events.step("resourcePreEvent", "refresh", each, each)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(self._refresh, list(self.old.values())))
        self.save()
        self._raise_if_stopped()

    def _refresh(self, old: Document) -> None:
        if not _is_in_google(old):
            self.events.step("resOutputsEvent", "refresh", old, old)
            return
        project = self._project(old)
        try:
            live = provider.read(self.sender, old, project)
        except provider.RefusedRequestError as error:
            self.failed = True
            begins = "Preview failed: " if self.is_preview else ""
            message = f"{begins}refreshing {old['urn']}: 1 error occurred:\n\t* {error.said}\n\n\n"
            self.events.diagnostic(message, "error", old["urn"])
            return
        with self._lock:
            if live is None:
                del self.old[old["urn"]]
                self.events.step("resOutputsEvent", "delete", old, None)
                self.events.changes["delete"] -= 1
                return
            self._live[old["urn"]] = live
            new = {**old, "inputs": provider.refreshed(old, live)}
            new["outputs"] = provider.outputs_of(new, live, project)
            self.old[old["urn"]] = new
        self.events.step("resOutputsEvent", "refresh", old, new)

    def register(self, new: Document, options: Options) -> Document:
        """Create or update a resource of the program; return its new state.

        Raises StoppedError.
        """
        self._raise_if_stopped()
        old = self.old.get(new["urn"])
        if not _is_in_google(new):
            return self._register_local(new, old)
        provider.set_defaults(new)
        if provider.kind_of(new) == _BUCKET and "name" not in new["inputs"]:
            name = old["inputs"]["name"] if old else self._random_name(new)
            new["inputs"]["name"] = name
        if options.trigger is not None:
            new["replacementTrigger"] = options.trigger
        if old is None:
            op = "create-replacement" if new["urn"] in self._gone else "create"
            return self._create(new, op=op)
        for path in options.ignore:
            _keep(path, new["inputs"], old["inputs"])
        changed = _changed(old["inputs"], new["inputs"])
        if self._must_replace(old, new, changed, options):
            return self._replace(old, new, options)
        if changed:
            return self._update(old, new, changed)
        return self._same(old, new)

    def _must_replace(
        self, old: Document, new: Document, changed: set[str], options: Options
    ) -> bool:
        if old.get("replacementTrigger") != new.get("replacementTrigger"):
            return True
        if new["urn"] in self.replaced_by_hand:
            return True
        return any(
            key in options.replace_on or not provider.changes_in_place(new, key, old=old)
            for key in changed
        )

    def _register_local(self, new: Document, old: Document | None) -> Document:
        """Register a component, the provider or the stack, which do not exist at Google."""
        if new["custom"]:
            new["id"] = old["id"] if old else str(uuid.uuid4())
        if new["type"] == STACK:
            new["outputs"] = old["outputs"] if old else {}
        op = "same" if old else "create"
        self.events.step("resourcePreEvent", op, old, new)
        self._keep_new(new)
        if new["type"] != STACK:
            self.events.step("resOutputsEvent", op, old, new)
        return new

    def export(self, urn: str, outputs: Document) -> None:
        """Set the stack's outputs."""
        stack = self.new[urn]
        old = self.old.get(urn)
        done = {**stack, "outputs": outputs}
        self._keep_new(done)
        self.events.step("resOutputsEvent", "same" if old else "create", old, done)

    def _create(self, new: Document, *, op: str, old: Document | None = None) -> Document:
        """Create the resource; `old` is deleted at the end."""
        self.events.step("resourcePreEvent", op, old, new)
        if self.is_preview:
            self._keep_new(new)
            self.events.step("resOutputsEvent", op, None, new)
            return new
        project = self._project(new)

        def make() -> None:
            provider.make(self.sender, new, project)
            new["id"] = provider.id_of(new, project)
            live = provider.read(self.sender, new, project) or {}
            new["outputs"] = provider.outputs_of(new, live, project)

        self._act("creating", op, None, new, make)
        if old is not None:
            with self._lock:
                self._replaced.append({**old, "delete": True})
        self._keep_new(new)
        self.events.step("resOutputsEvent", op, old, new)
        return new

    def _update(self, old: Document, new: Document, changed: set[str]) -> Document:
        new["id"] = old["id"]
        self.events.step("resourcePreEvent", "update", old, new)
        project = self._project(new)
        if self.is_preview:
            known = {key: new["inputs"][key] for key in changed if key in new["inputs"]}
            new["outputs"] = {**old["outputs"], **known}
        else:
            live = self._live[new["urn"]]

            def change() -> None:
                provider.change(self.sender, new, changed, live, project)
                now = provider.read(self.sender, new, project) or {}
                new["outputs"] = provider.outputs_of(new, now, project)

            self._act("updating", "update", old, new, change)
        self._keep_new(new)
        self.events.step("resOutputsEvent", "update", old, new)
        return new

    def _same(self, old: Document, new: Document) -> Document:
        new["id"] = old["id"]
        new["outputs"] = old["outputs"]
        self.events.step("resourcePreEvent", "same", old, new)
        self._keep_new(new)
        self.events.step("resOutputsEvent", "same", old, new)
        return new

    def _replace(self, old: Document, new: Document, options: Options) -> Document:
        """Delete the resource after its dependents, then create it.

        A resource with another name is created first, and the old one is deleted at the end, as
        Google's provider does.
        """
        is_renamed = old["inputs"].get("name") != new["inputs"].get("name")
        if is_renamed and not options.delete_first:
            made = self._create(new, op="create-replacement", old=old)
            self.events.step("resourcePreEvent", "replace", old, new)
            self.events.step("resOutputsEvent", "replace", old, new)
            return made
        with self._replacing:
            dependents = self._replaced_with(old["urn"])
            for each in [*reversed(dependents), old]:
                self._delete(each, op="delete-replaced")
                self._gone.add(each["urn"])
        if provider.kind_of(new) == _BUCKET:
            new["inputs"]["name"] = self._random_name(new)
        self.events.step("resourcePreEvent", "replace", old, new)
        self.events.step("resOutputsEvent", "replace", old, new)
        return self._create(new, op="create-replacement")

    def _replaced_with(self, urn: str) -> list[Document]:
        """Return dependents that must be replaced together with a resource.

        Firewall rules are excluded: in the acceptance of 9e71e47 a real engine deleted the machines
        of a network and kept its rules.
        """
        going = {urn}
        found = []
        for each in self.old.values():
            references = each.get("propertyDependencies", {})
            keys = [key for key, urns in references.items() if going & set(urns)]
            if each["type"].endswith(":Firewall") or each["urn"] in self.new:
                continue
            if any(not provider.changes_in_place(each, key) for key in keys):
                going.add(each["urn"])
                found.append(each)
        return found

    def protected(self) -> list[str]:
        """Return the URNs that a destroy must not delete."""
        return [urn for urn, each in self.old.items() if each.get("protect")]

    def with_their_needs(self, urns: Iterable[str]) -> set[str]:
        """Return these resources and all their dependencies."""
        found: set[str] = set()
        waiting = list(urns)
        while waiting:
            urn = waiting.pop()
            if urn in self.old and urn not in found:
                found.add(urn)
                waiting += _needs(self.old[urn])
        return found

    def delete_rest(self, keep: Iterable[str] = ()) -> None:
        """Delete replaced resources, and those in the state that were not registered.

        Raises StoppedError.
        """
        kept = {*self.new, *keep}
        while waiting := [
            *self._replaced,
            *(each for urn, each in self.old.items() if urn not in kept),
        ]:
            needed = {need for each in waiting for need in _needs(each)}
            free = [each for each in waiting if each["urn"] not in needed]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(self._attempt_delete, free))
            self._raise_if_stopped()

    def _attempt_delete(self, old: Document) -> None:
        try:
            self._delete(old, op="delete-replaced" if old.get("delete") else "delete")
        except FailedStepError:
            return

    def _delete(self, old: Document, *, op: str) -> None:
        if self.interrupted:
            raise FailedStepError
        self.events.step("resourcePreEvent", op, old, None)
        project = self._project(old)

        def remove() -> None:
            if not _is_in_google(old) or old.get("retainOnDelete"):
                return
            try:
                provider.remove(self.sender, old, project)
            except provider.RefusedRequestError as error:
                if error.status != 404:
                    raise

        if not self.is_preview:
            self._act("deleting", op, old, None, remove)
        with self._lock:
            if old.get("delete"):
                self._replaced.remove(old)
            else:
                self.old.pop(old["urn"], None)
        self.save()
        self.events.step("resOutputsEvent", op, old, None)

    def _act(
        self,
        doing: str,
        op: str,
        old: Document | None,
        new: Document | None,
        action: Callable[[], None],
    ) -> None:
        """Send a request, with its pending operation in the state. Raises FailedStepError."""
        known = new or old or {}
        operation = {"resource": known, "type": doing}
        with self._lock:
            self._pending = [each for each in self._pending if not _is_same(each, known)]
            self._pending.append(operation)
        self.save()
        try:
            action()
        except provider.RefusedRequestError as error:
            self.failed = True
            self.events.failed(op, old, new, _sentence(doing, known, error))
            raise FailedStepError(str(error)) from None
        finally:
            with self._lock:
                self._pending.remove(operation)
            self.save()

    def _keep_new(self, new: Document) -> None:
        with self._lock:
            self.new[new["urn"]] = new
        self.save()

    def _raise_if_stopped(self) -> None:
        if self.stopped:
            raise StoppedError("resource monitor shut down while waiting on step's done channel")

    def _project(self, resource: Document) -> str:
        """Return the project of the resource's provider."""
        urn = resource.get("provider", "").rpartition("::")[0]
        known = self.new.get(urn) or self.old.get(urn) or {}
        return str(known.get("inputs", {}).get("project", ""))

    def _random_name(self, resource: Document) -> str:
        return f"{resource['urn'].rpartition('::')[2]}-{secrets.token_hex(4)[:7]}"


def _sentence(doing: str, resource: Document, error: provider.RefusedRequestError) -> str:
    """Return the provider's message for a refusal."""
    kind = provider.kind_of(resource)
    noun = provider.NOUNS.get(kind, kind.rpartition(":")[2])
    if not error.said.startswith("googleapi"):
        return error.said
    if doing == "deleting":
        return f"Error when reading or editing {noun}: {error.said}"
    return f"Error {doing} {noun}: {error.said}"


def _is_in_google(resource: Document) -> bool:
    return str(resource["type"]).startswith("gcp:")


def _is_same(operation: Document, resource: Document) -> bool:
    return bool(operation["resource"]["urn"] == resource["urn"])


def _needs(resource: Document) -> list[str]:
    """Return the URNs that this resource depends on."""
    source = resource.get("provider", "").rpartition("::")[0]
    return [*resource.get("dependencies", ()), resource.get("parent", ""), source]


def _changed(old: Document, new: Document) -> set[str]:
    """Return the inputs that differ; unknown values count as equal."""
    empty: tuple[Any, ...] = ("", None, [], {})
    return {
        key
        for key in {*old, *new}
        if old.get(key) != new.get(key)
        and not (old.get(key) in empty and new.get(key) in empty)
        and UNKNOWN not in repr(new.get(key))
    }


def _keep(path: str, new: Document, old: Document) -> None:
    """Restore the old value at a path of `ignore_changes`."""
    *outer, last = path.replace('["', ".").replace('"]', "").split(".")
    for key in outer:
        if not isinstance(new.get(key), dict) or not isinstance(old.get(key), dict):
            return
        new[key] = dict(new[key])
        new, old = new[key], old[key]
    if last in old:
        new[last] = old[last]
    else:
        new.pop(last, None)
