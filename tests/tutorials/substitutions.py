"""Replacements in the commands of each page; all other text runs as it is printed."""

from __future__ import annotations

from collections.abc import Mapping

from tests.tutorials.pages import ROOT, Reduced

_HERE = {"source .venv/bin/activate": "the tests' environment is active"}
_SET_UP = _HERE | {"make setup": "CI's first command, and tests/test_install_payload.py"}
# A random Llama of a few hundred thousand weights; the hub's name needs the network.
_TINY = {"HuggingFaceTB/SmolLM2-135M-Instruct": "{tiny}"}
# Eight texts a step, to train for seconds.
_BRIEF = "--set batch.global_batch_size=8"
_NO_NODES = "the stand-in's machines accept no login; tests/rig/test_chain.py runs such commands"
_ON_SLURM = "needs Slurm: tests/rig/test_slurm.py runs such commands on a real one"

TABLE: Mapping[str, Reduced] = {
    "README.md": Reduced(
        replace={
            **_TINY,
            "--data chats.jsonl": f"--data chats.jsonl --steps 4 {_BRIEF}",
            # The commands below the three runs use the chat model.
            "--data tickets.csv": f"--data tickets.csv --steps 4 {_BRIEF} --runs-dir others",
            "--data pages.txt": f"--data pages.txt --steps 4 {_BRIEF} --runs-dir others",
            "tileforge chat runs/latest": "echo 'What is a list?' | tileforge chat runs/latest"
            " --max-new-tokens 8",
            # No run is left to stop, and a finished run resumes only with more steps.
            "tileforge stop": "{{ tileforge stop || true; }}",
            "--resume latest": "--resume latest --set train.steps=6",
            # No browser.
            "report latest --open": "report latest",
            # The tests exist; each runs by itself.
            "make test ARGS=": "collect ",
        },
        skip={
            "make run": "tests of the quickstart run it",
            "make test": "these are its tests",
            "pulumi up": "tests/tutorials/test_cloud.py",
            "python -m payload.orchestrate run": _NO_NODES,
            "pulumi destroy": "tests/tutorials/test_cloud.py",
        },
    ),
    "chat_model.md": Reduced(
        replace={
            **_TINY,
            # 200 of 3,501 pairs
            "benchmarks.docstrings chats.jsonl": "benchmarks.docstrings all.jsonl"
            " && head -n 200 all.jsonl > chats.jsonl",
            "--steps 60": f"--steps 4 {_BRIEF}",
            # The small model's context.
            "--sequence-length 256": "--sequence-length 128",
            # A terminal ends the chat with Ctrl-D.
            "tileforge chat runs/latest": "echo 'What is a list?' | tileforge chat runs/latest"
            " --max-new-tokens 8",
        },
        skip=_HERE,
        # The cost of a small model, on another machine.
        varies=frozenset(
            {
                "memory  about 6.0 GiB a rank",
                "time    about 40 min 9 s training, 41 min 56 s in all (start 12 s, evaluations "
                "55 s, checkpointing 19 s, samples 21 s)",
            }
        ),
    ),
    "classifier.md": Reduced(
        replace={
            **_TINY,
            "--steps 30": f"--steps 6 {_BRIEF}",
            # The page's later commands use the first training.
            "--out finetuned/balanced": "--out finetuned/balanced --runs-dir others",
        },
        skip=_HERE,
        # A model with random weights finds other labels.
        varies=frozenset(
            {
                "shipping\t0.9999\tWhere is my parcel?",
                "login\t1.0000\tI cannot remember my password.",
                "billing\t1.0000\tThe invoice is too high.",
            }
        ),
    ),
    "pretraining.md": Reduced(
        replace={
            **_TINY,
            "cat docs/*/*.md > pages.txt": "cat docs/guides/[a-m]*.md > pages.txt",
            "--steps 8": f"--steps 4 {_BRIEF}",
            # The small model's context.
            "--sequence-length 512": "--sequence-length 128",
            "train.steps=12": "train.steps=6",
        },
        skip=_HERE,
    ),
    "air_gapped.md": Reduced(
        replace={
            # The folder of the other machine; only the wheels are left there.
            "git -c": "cd .. && git -c",
            "make setup": "env -u PIP_FIND_LINKS make setup",
            "../smollm2": "{tiny}",
            "--steps 60": f"--steps 4 {_BRIEF}",
            "tileforge chat runs/latest": "echo 'What is a list?' | tileforge chat runs/latest"
            " --max-new-tokens 8",
        },
        skip={"source .venv/bin/activate": "the wheels of the test do not contain torch"},
    ),
    "google_cloud.md": Reduced(
        replace={
            "MY-PROJECT": "{project}",
            # No user confirms.
            "tileforge up": "tileforge up --yes",
            "tileforge down": "tileforge down --yes --without-collect",
            "pulumi stack rm dev": "pulumi stack rm dev --yes",
            # 40 of the standard library's files.
            "--source stdlib": "--source stdlib --max-documents 40",
            # The folder of the test has no configs.
            "plan payload": f"plan {ROOT}/payload",
        },
        skip=_SET_UP
        | {
            "gcloud auth login": "the stand-in needs no login",
            "gcloud auth application-default login": "the stand-in needs no login",
            "gcloud services enable --project MY-PROJECT compute.googleapis.com iam.googleapis.com "
            "iap.googleapis.com storage.googleapis.com": "the stand-in has these services",
            "gcloud auth application-default set-quota-project MY-PROJECT": "no login",
            "pulumi login --local": "the state is in the test's folder",
            "tileforge preflight --inventory stack --config payload/configs/gpt2_finetune.toml "
            "--wait 20": _NO_NODES,
            "python -m payload.orchestrate run --inventory stack --config "
            "payload/configs/gpt2_finetune.toml": _NO_NODES,
            "tileforge rehearse --budget-usd 1": "tests/orchestrate/cluster/test_rehearse.py",
            "curl -fsSL https://get.pulumi.com | sh && make test-engine "
            'PATH="$HOME/.pulumi/bin:$PATH"': "needs the network; make test-engine",
        },
    ),
    "slurm.md": Reduced(
        replace={
            "--out data/stdlib": "--out data/stdlib --max-documents 40",
            # 200 of 3,501 pairs
            "benchmarks.docstrings chats.jsonl": "benchmarks.docstrings all.jsonl"
            " && head -n 200 all.jsonl > chats.jsonl",
            # The small model, and its context.
            "./smollm2": "{tiny} --sequence-length 128",
            # The checks of the settings come first; then `no sbatch on PATH` has this exit code.
            "--set train.steps=100": "--set train.steps=100 || test $? = 31",
            "--set slurm.time=02:00:00": "--set slurm.time=02:00:00 || test $? = 31",
        },
        skip=_SET_UP
        | {
            "hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir smollm2": "the network",
            "tileforge chat runs/latest": _ON_SLURM,
            "tileforge status": _ON_SLURM,
            "tileforge logs": _ON_SLURM,
            "tileforge stop": _ON_SLURM,
            "tileforge run --site slurm --resume latest": _ON_SLURM,
            'tileforge generate runs/latest --prompt "def test_" --num-samples 1': _ON_SLURM,
            "tileforge report latest": _ON_SLURM,
        },
    ),
    "gpu.md": Reduced(
        replace={
            # The first stages; tests/benchmarks/test_gpu.py runs the others.
            "benchmarks.gpu --rehearse": "benchmarks.gpu --rehearse --budget-s 30 --page page.md",
            "tileforge preflight": "tileforge preflight --quick",
            # No GPU here: exit code 10 with the reason.
            "device.kind=cuda": "device.kind=cuda || test $? = 10",
        },
        skip=_HERE
        | {
            "make setup TORCH_CUDA=1": "downloads 3 GB",
            "python -m benchmarks.gpu --page gpu_results.md": "needs a GPU",
        },
    ),
}
