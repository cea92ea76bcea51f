"""Settings of the recorded runs, and programs that import modules of the recorded commit.

They are texts: later commits may have renamed those modules.
"""

TEXT_RUN = """\
[data]
dir = "data/text"
sequence_length = 32
[model]
preset = "tiny"
n_layer = 1
n_head = 2
n_embd = 32
[batch]
global_batch_size = 4
micro_batch_size = 1
[optimizer]
lr = 1e-2
min_lr = 1e-3
[schedule]
warmup_steps = 2
decay_steps = 12
[train]
steps = 8
eval_every = 4
checkpoint_every = 4
keep_checkpoints = 2
[precision]
dtype = "fp32"
[track]
to = ["csv"]
"""
ADAPTER_RUN = """\
[data]
sequence_length = 64
[adapter]
kind = "lora"
rank = 4
alpha = 8
[batch]
global_batch_size = 4
micro_batch_size = 2
[optimizer]
lr = 1e-2
min_lr = 1e-3
[schedule]
warmup_steps = 2
decay_steps = 8
[train]
steps = 6
eval_every = 3
checkpoint_every = 3
keep_checkpoints = 2
[precision]
dtype = "fp32"
[launch]
ranks_per_node = 1
"""

SAMPLES = """\
from pathlib import Path
from payload.run_record.run_samples import Sample, write_samples

made = [Sample(prompt="the a of", before=" red", after=" blue")]
write_samples(Path("runs/lora/samples.json"), made)
"""

# Two nodes with separate homes and processes, reached over SSH. `run` collects the results.
CLUSTER = """\
import subprocess, sys
from dataclasses import replace
from pathlib import Path
from tests.orchestrate.cluster.separate import SeparateNodes

nodes = SeparateNodes(Path("/srv/ada/nodes"), num_nodes=2)
nodes.folder.mkdir()
nodes.home, nodes.key = Path("/home/trainer"), Path("/srv/ada/.ssh/id_ed25519")
with nodes:
    known = nodes.inventory
    more = {"zone": "rack-1", "machine_type": "server", "memory_gib": 16.0, "hourly_usd": 0.5}
    made = tuple(replace(node, **more) for node in known.nodes)
    inventory = replace(known, cluster="rack", ssh_user="trainer", nodes=made)
    Path("rack.json").write_text(inventory.to_json(), encoding="utf-8")
    words = [sys.executable, "-m", "payload.orchestrate", *sys.argv[1:]]
    subprocess.run([*words, "--ssh-key", str(nodes.key)], check=True)
"""

# The cluster program under Pulumi's mocks; then the operator's commands on its outputs, with
# stand-ins for `pulumi` and for Google's interfaces.
STACK = """\
import json
from pathlib import Path
from payload.orchestrate.__main__ import main
from tests.infra.stacks import deploy
from tests.orchestrate.cloud.conftest import KEY, Site
from tests.orchestrate.cloud.standin import PROJECT, REGION, ZONE, CloudStandIn
from tests.orchestrate.cloud.test_failures import DETAILS
from tests.orchestrate.cloud.test_prices import CATALOG


def short(value):
    if isinstance(value, dict):
        return {key: short(each) for key, each in value.items()}
    if isinstance(value, list):
        return [short(each) for each in value]
    return "..." if isinstance(value, str) and len(value) > 1000 else value


folder = Path.cwd()
settings = {"project": PROJECT, "bucket": "create", "nodeCount": 2}
made = deploy(settings, folder=folder / "mocks")
stack = "urn:pulumi:dev::tileforge::pulumi:pulumi:Stack::tileforge-dev"
parts = [{"urn": stack, "custom": False, "type": "pulumi:pulumi:Stack", "outputs": made.outputs}]
for each in made.resources:
    kind, name = each["type"], each["name"]
    part = {"urn": f"urn:pulumi:dev::tileforge::{kind}::{name}", "type": kind, "parent": stack}
    part["custom"] = kind.startswith(("gcp:", "pulumi:providers:"))
    if part["custom"]:
        part["id"] = f"{name}-id"
    parts.append({**part, "inputs": short(each["inputs"]), "outputs": {}})
manifest = {"time": "2026-11-26T05:08:25Z", "magic": "", "version": "v3.200.0"}
state = {"version": 3, "deployment": {"manifest": manifest, "resources": parts}}
Path("stack.outputs.json").write_text(json.dumps(made.outputs, indent=2) + "\\n")
Path("stack.export.json").write_text(json.dumps(state, indent=1) + "\\n")
with CloudStandIn() as cloud:
    site = Site(folder, cloud)
    names = [node["name"] for node in made.outputs["inventory"]["nodes"]]
    zones = ["us-central1-f", "us-central1-b", ZONE]
    site.configure(cluster="dev", project=PROJECT, region=REGION, zones=zones)
    for name in names:
        cloud.add_node(name, labels={"tileforge-cluster": "dev"})
        cloud.guest_attributes[name] = {"ssh-ed25519": KEY}
    cloud.regions[REGION] = {"C3_CPUS": (100.0, 0.0), "SSD_TOTAL_GB": (500.0, 0.0)}
    cloud.skus = CATALOG
    site.pulumi.outputs(**made.outputs)
    site.pulumi.on("config", "set")
    site.pulumi.on("preview")
    site.pulumi.on("up", out="done")
    site.pulumi.on("up", out=DETAILS, status=255, times=1)
    main(["doctor"], site.env)  # 10: the stand-in's zones have no such machine
    assert main(["up", "--yes", "--next-zone"], site.env) == 0
    model = ["--set", "model.preset=tiny"]
    assert main(["plan", "--inventory", "stack:dev", *model], site.env) == 0
"""
