"""A Hugging Face hub on a local port, with one model and its commits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants
from pytest import MonkeyPatch

from tests.data.fake_hub import Hub, serving, tree

NAME = "someone/small-model"
FIRST, SECOND = "1" * 40, "2" * 40


@contextmanager
def model_hub(commits: Mapping[str, Path], *, gated: bool = False) -> Iterator[str]:
    """Serve folders by commit as `NAME`, the last one as `main`; yield the value of HF_ENDPOINT.

    The mapping can change during that time.
    """
    attributes = {"commits": commits, "gated": gated}
    with serving(type("ModelHub", (_ModelHub,), attributes)) as endpoint:
        yield endpoint


def use_hub(monkeypatch: MonkeyPatch, *, endpoint: str, cache: Path, offline: bool = False) -> None:
    """Point this process's hub client, which reads the environment on import, to a fake hub."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


class _ModelHub(Hub):
    commits: Mapping[str, Path]
    gated: bool

    def answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        api, files = f"/api/models/{NAME}", f"/{NAME}/resolve/"
        if path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            if self._set(revision, with_body=with_body) and self._is_open(with_body=with_body):
                self.send_repo_file(self.root / name, with_body=with_body)
        elif path.startswith(f"{api}/tree/"):
            if self._set(path.removeprefix(f"{api}/tree/"), with_body=with_body):
                self.send(json.dumps(tree(self.root)).encode(), {}, with_body=with_body)
        elif path == api or path.startswith(f"{api}/revision/"):
            revision = path.removeprefix(api).removeprefix("/revision/") or "main"
            if self._set(revision, with_body=with_body):
                names = [{"rfilename": entry["path"]} for entry in tree(self.root)]
                info = {"id": NAME, "sha": self.commit, "private": False, "tags": []}
                self.send(json.dumps({**info, "siblings": names}).encode(), {}, with_body=with_body)
        else:
            self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body, status=404)

    def _set(self, revision: str, *, with_body: bool) -> bool:
        """Select the folder of a revision, or respond that it does not exist."""
        commit = list(self.commits)[-1] if revision == "main" else revision
        if commit not in self.commits:
            code = {"X-Error-Code": "RevisionNotFound"}
            self.send(b"{}", code, with_body=with_body, status=404)
            return False
        self.commit, self.root = commit, self.commits[commit]
        return True

    def _is_open(self, *, with_body: bool) -> bool:
        if self.gated:
            code = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
            self.send(b"", code, with_body=with_body, status=403)
        return not self.gated
