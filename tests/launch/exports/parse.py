"""Holds exported files against their engine's own parser or schema; run in `requirements.txt`.

`parse.py ENGINE FILE...` ends with 0 for files that the engine takes. What a parser would pass over
in silence (a key that it does not know) is refused here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMA = Path(__file__).with_name("mpijob_v2beta1.schema.json")
KUBERNETES = "1.33"


def skypilot(text: str) -> None:
    """SkyPilot's own task, from the text of a file."""
    from sky import Task

    Task.from_yaml_str(text)


def dstack(text: str) -> None:
    """The configuration that `dstack apply` sends."""
    from dstack._internal.core.models.configurations import parse_run_configuration

    parse_run_configuration(yaml.safe_load(text))


def trainjob(text: str) -> None:
    """Kubeflow's generated models, which know their custom resources to the last field."""
    from kubeflow_trainer_api import models

    kinds = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    documents = list(yaml.safe_load_all(text))
    assert {document["kind"] for document in documents} == set(kinds)
    for document in documents:
        known = kinds[document["kind"]].from_dict(document).to_dict()
        assert known == document, f"a field of {document['kind']} is not known"


def mpijob(text: str) -> None:
    """The operator's schema, and Kubernetes' own for the pods in it."""
    import jsonschema
    import kubernetes_validate

    document = yaml.safe_load(text)
    assert document["apiVersion"] == "kubeflow.org/v2beta1" and document["kind"] == "MPIJob"
    schema = _strict(json.loads(SCHEMA.read_text(encoding="utf-8"))["schema"])
    jsonschema.validate(document, schema)
    for replica in document["spec"]["mpiReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        kubernetes_validate.validate(pod | replica["template"], KUBERNETES, strict=True)


def _strict(schema: Any) -> Any:
    """Refuse unknown keys, as the API server does with `kubectl apply --validate=strict`."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


def main() -> int:
    """Read the files, and raise if one of them has an error."""
    engine, *paths = sys.argv[1:]
    parsers = {"skypilot": skypilot, "dstack": dstack, "trainjob": trainjob, "mpijob": mpijob}
    for path in paths:
        parsers[engine](Path(path).read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
