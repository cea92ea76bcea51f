"""A disk layer with a repository of monitoring's packages: Debian's, and a stand-in for Grafana.

Grafana is not in Debian's archive, so a small package with the same name and version replaces it;
its service listens on the address in Grafana's settings. The other packages are a node's own.
"""

from __future__ import annotations

from pathlib import Path

from infra.cloud_init import GRAFANA_VERSION
from tests.rig.cache import cached
from tests.rig.host import run
from tests.rig.image import archive_sources, root_image, write_package_index
from tests.support.waiting import DEADLINE_S

_PACKAGES = ("prometheus", "prometheus-node-exporter")
_REPOSITORY = "srv/monitoring"
_SERVICE = """\
[Unit]
Description=Stand-in for Grafana
[Service]
ExecStart=/usr/bin/python3 -c "import http.server, os; http.server.HTTPServer((os.environ['GF_SERVER_HTTP_ADDR'], int(os.environ['GF_SERVER_HTTP_PORT'])), http.server.SimpleHTTPRequestHandler).serve_forever()"
WorkingDirectory=/etc/tileforge/monitoring
[Install]
WantedBy=multi-user.target
"""  # noqa: E501


def monitoring_layer() -> Path:
    """Return the layer for `Rig(layers=[...])`; the first call needs the network."""
    recipe = (root_image().name, *_PACKAGES, GRAFANA_VERSION, _SERVICE, "1")
    return cached("monitoring", recipe=recipe, build=_build)


def _build(folder: Path) -> None:
    packages = folder / _REPOSITORY
    packages.mkdir(parents=True)
    image = root_image() / "root"
    lists = folder.with_name("monitoring.list")
    lists.write_text(archive_sources(), encoding="utf-8")
    nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2", "--pipe"]
    # The image does not change: the command writes into memory.
    nspawn += ["--volatile=overlay", "--resolv-conf=replace-host", f"--directory={image}"]
    nspawn += [f"--bind={packages}:/srv/new", f"--bind-ro={lists}:/etc/apt/sources.list"]
    apt = "apt-get -qq -y --no-install-recommends -o Acquire::Retries=3"
    script = (
        f"{apt} update && {apt} install --download-only {' '.join(_PACKAGES)} "
        "&& cp /var/cache/apt/archives/*.deb /srv/new/"
    )
    run([*nspawn, "sh", "-c", script], timeout_s=DEADLINE_S)
    lists.unlink()
    _make_stand_in(packages)
    write_package_index(packages)
    source = folder / "etc/apt/sources.list.d/monitoring.list"
    source.parent.mkdir(parents=True)
    source.write_text(f"deb [trusted=yes] file:/{_REPOSITORY} ./\n", encoding="ascii")


def _make_stand_in(packages: Path) -> None:
    tree = packages / "grafana"
    unit = tree / "lib/systemd/system/grafana-server.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(_SERVICE, encoding="ascii")
    control = tree / "DEBIAN" / "control"
    control.parent.mkdir()
    control.write_text(
        f"Package: grafana\nVersion: {GRAFANA_VERSION}\nArchitecture: all\nDepends: python3\n"
        "Maintainer: tests <tests@example.org>\nDescription: stand-in for Grafana\n",
        encoding="ascii",
    )
    run(["dpkg-deb", "--root-owner-group", "--build", tree, packages / "grafana.deb"])
    run(["rm", "-r", tree])
