"""A saved drafter is a complete Hub repo: it loads and drafts in a bare interpreter, offline, on every host.

Each scenario runs in a fresh interpreter (`hub.py`) that can import only torch and transformers and cannot open a
connection, with module cache and Hub cache of its own. `DSPARK_OLDEST_PYTHON` names an interpreter with the oldest
supported transformers; `make test` sets it.
"""

import ast
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target, plain
from hub import NEW_TOKENS, PROMPT, weights_digest
from safetensors import safe_open
from transformers import PreTrainedModel, modeling_utils
from transformers.dynamic_module_utils import get_relative_import_files, get_relative_imports

from dspark.modeling_dspark import DSparkConfig, DSparkModel


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("modeling_dspark/*_dspark.py"), *ROOT.glob("candidate_generator/*_dspark.py")])
REPO_ID = "some-org/Tiny-DSpark-v1.0"
FOLDER = "Tiny-DSpark-v1.0"  # a dot and hyphens, as repo names have
REVISION, MARKED_REVISION = "a" * 40, "b" * 40
HOSTS = ("newest", "oldest")
RESAVED = ("resaved", "inplace", "from_hub")  # ways a remotely loaded drafter was saved
CONFIG_KEYS = ["model_type", "block_size", "draft_vocab_size", "target_layer_ids", "layer_types", "sliding_window"]
CONFIG_KEYS += ["markov_rank", "confidence_temperatures", "schedule", "target_fingerprint", "eos_token_id"]
# Appended to a file at the end of the import chain: every round leaves a mark in that drafter's statistics.
MARK = """

_record_round = DSparkStatistics.record_round


def _marked_round(self, *args):
    self.rests["marked"] += 1
    _record_round(self, *args)


DSparkStatistics.record_round = _marked_round
"""


def bigram_drafter(target):
    """A drafter that knows the target's usual next token, in its sequential head's weights alone: a drafter whose
    weights were lost on the way accepts nothing. Reduced vocabulary, one sliding layer, every slot confident."""
    text = plain(target, torch.tensor(PROMPT), max_new_tokens=NEW_TOKENS)[0].tolist()
    kept = sorted(set(text))
    drafter = make_drafter(
        target,
        draft_vocab_size=len(kept),
        markov_rank=VOCAB,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=6,
        confidence_temperatures={"0.0": [1.0 + 0.125 * i for i in range(7)]},
        schedule="fixed",
    )
    following = defaultdict(Counter)
    for token, after in zip(text, text[1:]):
        following[token][after] += 1
    with torch.no_grad():
        drafter.d2t.copy_(torch.tensor(kept) - torch.arange(len(kept)))
        drafter.markov_head.markov_w1.weight.copy_(100 * torch.eye(VOCAB))
        drafter.markov_head.markov_w2.weight.zero_()
        for token, counts in following.items():
            drafter.markov_head.markov_w2.weight[kept.index(counts.most_common(1)[0][0]), token] = 1.0
        drafter.confidence_head.proj.bias.fill_(6.0)
    return drafter


def copy_marked(folder: Path, to: Path) -> Path:
    """A repo of another code version: the same files but for a mark."""
    shutil.copytree(folder, to)
    with open(to / "statistics_dspark.py", "a") as file:
        file.write(MARK)
    return to


def fetched_by_from_pretrained(folder: Path) -> set[str]:
    """What `from_pretrained` asks a Hub repo for: config, weights, and the relative-import closure of the files named
    in `auto_map`, as the host itself computes it."""
    modules = {reference.split(".")[0] + ".py" for reference in read_config(folder)["auto_map"].values()}
    closure = {Path(f).name for name in modules for f in get_relative_import_files(folder / name)}
    return {"config.json", "model.safetensors"} | modules | closure


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def put_in_hub_cache(hub: Path, folder: Path, revision: str, main: bool) -> None:
    """Lay a repo out as the Hub client caches it: blobs by content, a snapshot of links into them, a ref."""
    repo = hub / f"models--{REPO_ID.replace('/', '--')}"
    snapshot = repo / "snapshots" / revision
    for sub in (repo / "blobs", repo / "refs", snapshot):
        sub.mkdir(parents=True, exist_ok=True)
    for name in fetched_by_from_pretrained(folder):
        content = (folder / name).read_bytes()
        blob = hashlib.sha256(content).hexdigest()
        (repo / "blobs" / blob).write_bytes(content)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob))
    if main:
        (repo / "refs" / "main").write_text(revision)


def code_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.py")}


SHIPPED = {file.name: file.read_bytes() for file in SOURCES}


class World:
    """Folders the scenarios share, and the interpreters that run them. A scenario runs when it is first asked for."""

    def __init__(self, path: Path):
        self.path = path
        self.target, self.drafter = path / "target", path / "saved" / FOLDER
        target = make_target(seed=5, spread=4.0)
        target.save_pretrained(self.target)
        drafter = bigram_drafter(target)
        self.config = {key: getattr(drafter.config, key) for key in CONFIG_KEYS}
        self.digest = weights_digest(drafter)
        drafter.save_pretrained(self.drafter)
        self.marked = copy_marked(self.drafter, path / "marked" / FOLDER)
        self.half = path / "half" / FOLDER
        drafter.to(torch.bfloat16).save_pretrained(self.half)
        self.hub = path / "hub"
        put_in_hub_cache(self.hub, self.marked, MARKED_REVISION, main=False)
        put_in_hub_cache(self.hub, self.drafter, REVISION, main=True)

    def interpreter(self, host: str) -> str:
        if host == "newest":
            return sys.executable
        python = os.environ.get("DSPARK_OLDEST_PYTHON")
        if not python:
            pytest.fail(
                "DSPARK_OLDEST_PYTHON is not set, so nothing was shown on the oldest supported transformers: run "
                "`make test`, which sets it up, or name an interpreter that has it.",
                pytrace=False,
            )
        return python

    def run(self, host: str, *steps, hook: str = "1", isolated: bool = True, **job) -> dict:
        """What steps found, run in this order in one fresh interpreter of a host."""
        python = self.interpreter(host)
        home = Path(tempfile.mkdtemp(dir=self.path))
        steps = [step if isinstance(step, tuple) else (step, {}) for step in steps]
        folders = {"target": self.target, "drafter": self.drafter, "half": self.half}
        job = {**folders, "steps": steps, "isolated": isolated, "result": home / "result.json", **job}
        (home / "job.json").write_text(json.dumps({**job, "config_keys": CONFIG_KEYS}, default=str))
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        environment.update(HOME=str(home), HF_HOME=str(home / "hf"), HF_HUB_CACHE=str(self.hub))
        environment.update(HF_MODULES_CACHE=str(home / "modules"), HF_HUB_OFFLINE="1")
        environment.update(OMP_NUM_THREADS="1", DSPARK_HOOK=hook)
        done = subprocess.run(
            [python, "-I", str(Path(__file__).with_name("hub.py")), str(home / "job.json")],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads((home / "result.json").read_text())

    def resaved(self, host: str, how: str) -> Path:
        return self.path / f"{how}-{host}" / FOLDER


# The scenarios. Each runs once, in an interpreter of its own, when a test first asks for it.


@functools.cache
def from_folder(world: World, host: str) -> dict:
    """What one does with a drafter loaded from a folder that the installed package saved."""
    steps = ["isolation", "load", "load_half", "load_untrusted", "copies", "shim", "resave"]
    if host == "newest":
        steps.append("together")
    saved = {"resaved": world.resaved(host, "resaved"), "inplace": world.resaved(host, "inplace")}
    return world.run(host, *steps, **saved, cold=world.path / "cold")


@functools.cache
def from_hub(world: World, host: str) -> dict:
    """A repo id in the Hub cache; then the folders that remotely loaded drafters saved."""
    from_folder(world, host)
    folders = [("load", {"drafter": world.resaved(host, how), "as": how}) for how in RESAVED]
    resave = ("resave", {"drafter": REPO_ID, "resaved": world.resaved(host, "from_hub")})
    return world.run(host, ("load", {"drafter": REPO_ID}), resave, *folders)


@functools.cache
def switched_off(world: World, host: str) -> dict:
    return world.run(host, "switched_off", "shim", hook="0")


@functools.cache
def side_by_side(world: World, order: str) -> dict:
    """The package, and folders and repo ids of two code versions, in one process."""
    sources = [
        ("plain folder", world.drafter, None),
        ("marked folder", world.marked, None),
        ("installed", world.drafter, None),
        ("plain id", REPO_ID, None),
        ("marked id", REPO_ID, MARKED_REVISION),
    ]
    sources = sources if order == "forward" else sources[::-1]
    return world.run("newest", "mixed", isolated=False, sources=sources, saved=world.path / order)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def found(run: dict, step: str) -> dict:
    result = run[step]
    assert "error" not in result, result["error"]
    return result


def assert_same_text(result: dict) -> None:
    """Plain decoding's text, with the drafter's weights at work."""
    assert result["same"] and result["new"] == NEW_TOKENS
    assert result["drafted"] > 0 and result["accepted"] > 0


def assert_loaded(world: World, result: dict) -> None:
    assert result["class"] == ["transformers_modules", "DSparkModel"]
    assert result["keys"] == []
    assert result["dtype"] == "torch.float32" and result["digest"] == world.digest
    assert result["config"] == world.config
    assert result["hook_depth"] == 1
    assert_same_text(result)
    assert result["throughput"]["same"] and result["throughput"]["rounds"] > 0


@pytest.mark.parametrize("host", HOSTS)
def test_child_interpreters_are_bare(world, host):
    for run in (from_folder(world, host), from_hub(world, host), switched_off(world, host)):
        assert run["attempts"] == [] and run["imported"] == []
    imports = found(from_folder(world, host), "isolation")["imports"]
    assert {name for name, here in imports.items() if here} == {"torch", "transformers"}


def test_oldest_host_is_the_oldest_supported(world):
    lowest = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    version = found(from_folder(world, "oldest"), "isolation")["transformers"]
    assert version.split(".")[:2] == lowest.split(".")[:2]


@pytest.mark.parametrize("host", HOSTS)
def test_saved_folder_loads_and_generates(world, host):
    assert_loaded(world, found(from_folder(world, host), "load"))


@pytest.mark.parametrize("host", HOSTS)
def test_half_precision_folder(world, host):
    result = found(from_folder(world, host), "load_half")
    assert result["dtypes"] == ["torch.bfloat16"]
    assert result["drafted"] > 0


@pytest.mark.parametrize("host", HOSTS)
def test_untrusted_folder_is_refused_as_the_host_does(world, host):
    message = found(from_folder(world, host), "load_untrusted")["message"]
    assert "contains custom code" in message and "trust_remote_code=True" in message


@pytest.mark.parametrize("host", HOSTS)
def test_repo_id_from_hub_cache(world, host):
    assert_loaded(world, found(from_hub(world, host), "load"))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("how", RESAVED)
def test_resaved_folder(world, host, how):
    found(from_folder(world, host), "resave")
    assert_loaded(world, found(from_hub(world, host), how))
    folder = world.resaved(host, how)
    assert_complete_repo(folder)
    before, after = read_config(world.drafter), read_config(folder)
    assert {**before, "transformers_version": ""} == {**after, "transformers_version": ""}


def test_folder_saved_on_the_oldest_host_loads_on_the_newest(world):
    from_folder(world, "oldest")
    run = world.run("newest", ("load", {"drafter": world.resaved("oldest", "resaved")}))
    assert_loaded(world, found(run, "load"))


@pytest.mark.parametrize("host", HOSTS)
def test_copies_generate(world, host):
    results = found(from_folder(world, host), "copies")
    for name in ("pickled before use", "pickled", "deep copied", "torch.save", "original"):
        assert_same_text(results[name])
        assert results[name]["own"], name


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("hook", ["on", "off"])
@pytest.mark.parametrize("way", ["shim", "decode_for"])
def test_other_spellings(world, host, hook, way):
    result = found(from_folder(world, host) if hook == "on" else switched_off(world, host), "shim")[way]
    assert_same_text(result)
    assert result["keywords"] and result["streams"]
    assert result["stopped"] and 20 < result["stopped_after"] < NEW_TOKENS
    assert result["dict"] and result["scores"] == [NEW_TOKENS, NEW_TOKENS]


@pytest.mark.parametrize("host", HOSTS)
def test_off_switch(world, host):
    result = found(switched_off(world, host), "switched_off")
    assert result["untouched"]
    assert result["left_on_target"] == []
    for part in ("DSPARK_HOOK", "custom_generate", "decode_for"):
        assert part in result["message"]


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_code_versions_side_by_side(world, order):
    """Each drafter runs its own code to the end of its import chain, whichever was loaded first."""
    result = found(side_by_side(world, order), "mixed")
    assert result["one_hook"] and result["hook_depth"] == 1
    assert {name for name, root in result["roots"].items() if root == "dspark"} == {"installed"}
    assert len(result["turns"]) == 2
    for turn in result["turns"]:
        assert set(turn) == {"plain folder", "marked folder", "installed", "plain id", "marked id"}
        for name, outcome in turn.items():
            assert_same_text(outcome)
            assert outcome["rests"].get("marked", 0) == (outcome["rounds"] if "marked" in name else 0), name
    for name in result["roots"]:  # and saves its own
        assert code_of(world.path / order / name) == code_of(world.marked if "marked" in name else world.drafter)


def test_four_processes_at_once(world):
    result = found(from_folder(world, "newest"), "together")
    assert result["first"] == len(result["answers"]) == 4
    for answer in result["answers"]:
        assert "lost" not in answer and "failed" not in answer, answer
        assert answer["fresh"]
        assert answer["same"] and answer["rounds"] > 0
    assert result["tables"] == 1


def assert_complete_repo(folder: Path) -> None:
    """All code files byte for byte, an `auto_map` that stays in the folder, and the shim."""
    assert code_of(folder) == SHIPPED
    assert read_config(folder)["auto_map"] == {
        "AutoConfig": "configuration_dspark.DSparkConfig",
        "AutoModel": "modeling_dspark.DSparkModel",
    }
    shim = (folder / "custom_generate" / "generate.py").read_text()
    assert [n.name for n in ast.parse(shim).body if isinstance(n, ast.FunctionDef)] == ["generate"]


def test_saved_folder_is_a_complete_repo(world):
    assert_complete_repo(world.drafter)


def test_upload_while_saving_has_the_code(tmp_path, monkeypatch):
    """`save_pretrained(push_to_hub=True)` uploads from within the host's own method."""
    uploaded = set()

    class Hub:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=repo_id)

    def upload(self, folder, repo_id, timestamps, **kwargs):
        uploaded.update(path.name for path in Path(folder).iterdir() if path.name not in timestamps)

    monkeypatch.setattr(modeling_utils, "hf_api", Hub, raising=False)
    monkeypatch.setattr(modeling_utils, "create_repo", Hub().create_repo, raising=False)
    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    make_drafter(make_target()).save_pretrained(tmp_path, push_to_hub=True, repo_id=REPO_ID)
    assert {"config.json", "model.safetensors", "custom_generate", *SHIPPED} <= uploaded


def test_one_load_fetches_all_of_decoding(world):
    """The import closure of the model file, as the host finds it, is every file that ships."""
    closure = {Path(f).name for f in get_relative_import_files(world.drafter / "modeling_dspark.py")}
    assert closure | {"modeling_dspark.py"} == set(SHIPPED)


def test_file_names_are_distinct():
    assert len(SHIPPED) == len(SOURCES) > 10


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: f.name)
def test_hub_file_rules(file):
    """Imports that a Hub repo can carry, in the one form the host's regular expressions see, and nowhere else."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    absolute = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    absolute |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    allowed = {*sys.stdlib_module_names, "torch", "transformers"}
    assert {name.partition(".")[0] for name in absolute} <= allowed

    relative = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    assert all(node.level == 1 and node.module for node in relative)
    siblings = {node.module for node in relative}
    assert {f"{name}.py" for name in siblings} <= set(SHIPPED)
    # The host reads text, not code: an import in a docstring would count, one in another form would not.
    assert set(get_relative_imports(file)) == siblings

    # The installed name is written only in the branch that a flat repo never takes.
    guarded = [node for node in nodes if isinstance(node, ast.If) and "__package__" in ast.unparse(node.test)]
    inside = {id(n) for branch in guarded for part in [branch.test, *branch.body] for n in ast.walk(part)}
    for node in nodes:
        if isinstance(node, ast.Constant) and str(node.value).startswith("dspark."):
            assert id(node) in inside, ast.unparse(node)


def test_config_round_trip(tmp_path):
    target = make_target()
    config = DSparkConfig.from_target(
        target.config,
        num_hidden_layers=3,
        block_size=5,
        target_layer_ids=[-1, 0, 2],
        draft_vocab_size=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=16,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        markov_rank=4,
        markov_head_type="rnn",
        confidence_temperatures={"0.0": [1.5] * 5, "0.7": [0.5] * 5},
        target_revision="abc",
        schedule="threshold",
        schedule_threshold=0.25,
    )
    config.save_pretrained(tmp_path)
    loaded = DSparkConfig.from_pretrained(tmp_path)
    assert comparable(loaded) == comparable(config)
    assert comparable(DSparkConfig(**read_config(tmp_path))) == comparable(config)


def comparable(config) -> dict:
    return {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "_name_or_path")}


@pytest.mark.parametrize("tied", [False, True])
def test_file_holds_drafter_tensors_only(tmp_path, prompt, tied):
    """Also after the drafter met a target whose embedding and head share memory; the target stays as it was."""
    target = make_target(tie_word_embeddings=tied)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    drafter = make_drafter(target, draft_vocab_size=16, schedule="fixed")
    drafter.d2t.copy_(torch.arange(16))
    target.generate(prompt, assistant_model=drafter, do_sample=False, max_new_tokens=8)
    assert drafter.statistics.drafted > 0
    drafter.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}
    assert sum(sizes.values()) == sum(p.numel() for p in drafter.parameters()) + drafter.d2t.numel()
    assert set(sizes) == {name for name, _ in drafter.named_parameters()} | {"d2t"}
    loaded = DSparkModel.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
