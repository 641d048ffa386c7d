"""What a user's bare interpreter does with a drafter's folder: the child side of `test_hub.py`.

`python -I hub.py job.json` runs the steps a job names, one after the other, and writes what they found to the job's
`result`. Nothing here imports `dspark`. In an isolated job nothing but the standard library, torch, transformers and
what those two require can be imported; in none can a socket connect.
"""

import copy
import hashlib
import importlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import pickle
import re
import shutil
import socket
import string
import sys
import time
import traceback
from pathlib import Path


PROMPT = [[33, 28, 34, 3, 60, 32, 7, 45, 43]]
NEW_TOKENS = 40
ALPHABET = string.ascii_letters + string.digits + "+-"  # token i reads ALPHABET[i]
RUNTIME_PACKAGES = ("torch", "transformers")
OURS = {"dspark", "modeling_dspark", "candidate_generator", "training", "evaluation"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements_of(names) -> set[str]:
    """The distributions `names` and all they require, extras left out."""
    found, todo = set(), [canonical(name) for name in names]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # meant for another platform
        found.add(name)
        todo += [canonical(re.match(r"[\w.-]+", line)[0]) for line in lines if "extra ==" not in line]
    return found


class HidingFinder:
    """A module finder behind which some modules and distributions look as if they were not installed."""

    def __init__(self, finder, hidden: set[str], allowed: set[str]):
        self.finder, self.hidden, self.allowed = finder, hidden, allowed

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)

    def find_distributions(self, *args, **kwargs):
        find = getattr(self.finder, "find_distributions", lambda *a, **k: ())
        return [d for d in find(*args, **kwargs) if canonical(d.metadata["Name"] or "") in self.allowed]

    def __getattr__(self, name):
        return getattr(self.finder, name)


def hide_other_packages() -> None:
    allowed = requirements_of(RUNTIME_PACKAGES)
    owners = importlib.metadata.packages_distributions()
    hidden = {module for module, names in owners.items() if not allowed & {canonical(n) for n in names}} | OURS
    sys.meta_path[:] = [HidingFinder(finder, hidden, allowed) for finder in sys.meta_path]


def cut_network(attempts: list) -> None:
    """Every way out fails and is noted in `attempts`."""

    def refuse(*args, **kwargs):
        attempts.append(str(args[-1]))
        raise OSError("no network here")

    socket.socket.connect = socket.socket.connect_ex = refuse
    socket.getaddrinfo = socket.create_connection = refuse


def load_target(job):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()


def load_drafter(source, **kwargs):
    from transformers import AutoModel

    return AutoModel.from_pretrained(source, trust_remote_code=True, **kwargs)


def prompt():
    import torch

    return torch.tensor(PROMPT)


def greedy(**kwargs):
    from transformers import GenerationConfig

    values = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    return GenerationConfig(**{**values, **kwargs})


def compare(target, drafter, run=None, **settings) -> dict:
    """Plain decoding against `run` (by default `generate` with the drafter): same text, and what was drafted."""
    plain = target.generate(prompt(), generation_config=greedy())
    if run is None:
        text = target.generate(prompt(), assistant_model=drafter, generation_config=greedy(**settings))
    else:
        text = run()
    s = drafter.statistics
    out = {"same": text.tolist() == plain.tolist(), "new": plain.shape[1] - len(PROMPT[0])}
    return {**out, "rounds": s.rounds, "drafted": s.drafted, "accepted": s.accepted, "rests": dict(s.rests)}


def weights_digest(model) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def hook_depth() -> int:
    """Wrappers around the host's assisted loop."""
    from transformers import GenerationMixin

    depth, method = 0, GenerationMixin._assisted_decoding
    while hasattr(method, "__wrapped__"):
        depth, method = depth + 1, method.__wrapped__
    return depth


def tokenizer():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(ALPHABET)}, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def streamer(log: list):
    from transformers.generation.streamers import BaseStreamer

    class Log(BaseStreamer):
        def put(self, value):
            log.extend(value.flatten().tolist())

        def end(self):
            log.append("end")

    return Log()


def isolation(job) -> dict:
    """What can be imported here, and what cannot."""
    found = {}
    for name in (*RUNTIME_PACKAGES, *sorted(OURS), "accelerate", "peft", "pytest"):
        try:
            importlib.import_module(name)
            found[name] = True
        except ImportError:
            found[name] = False
    return {"imports": found, "transformers": importlib.import_module("transformers").__version__}


def load(job) -> dict:
    """Load a folder or a repo id and generate, with the schedule of the config and with the default one."""
    drafter, info = load_drafter(job["drafter"], output_loading_info=True)
    target = load_target(job)
    return {
        "class": [type(drafter).__module__.split(".")[0], type(drafter).__name__],
        "keys": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])),
        "dtype": str(drafter.dtype),
        "digest": weights_digest(drafter),
        "config": {key: getattr(drafter.config, key) for key in job["config_keys"]},
        "hook_depth": hook_depth(),
        **compare(target, drafter),
        "throughput": compare(target, drafter, dspark_schedule="throughput"),
    }


def load_half(job) -> dict:
    """`dtype="auto"` takes the dtype of the file; a bf16 drafter drafts for a bf16 target."""
    import torch

    target, drafter = load_target(job).to(torch.bfloat16), load_drafter(job["half"], dtype="auto")
    target.generate(prompt(), assistant_model=drafter, generation_config=greedy())
    return {"dtypes": sorted({str(p.dtype) for p in drafter.parameters()}), "drafted": drafter.statistics.drafted}


def load_untrusted(job) -> dict:
    from transformers import AutoModel

    try:
        AutoModel.from_pretrained(job["drafter"])
    except ValueError as error:
        return {"message": str(error)}
    return {"message": "loaded without being trusted"}


def copies(job) -> dict:
    """Copies of a loaded drafter, made before and after it met a target, draft on their own."""
    import torch

    drafter, target = load_drafter(job["drafter"]), load_target(job)
    unused = pickle.dumps(drafter)
    compare(target, drafter)
    file = io.BytesIO()
    torch.save(drafter, file)
    file.seek(0)
    made = {
        "pickled before use": pickle.loads(unused),
        "pickled": pickle.loads(pickle.dumps(drafter)),
        "deep copied": copy.deepcopy(drafter),
        "torch.save": torch.load(file, weights_only=False),
    }
    mine = drafter.statistics
    results = {name: {"own": other is not drafter, **compare(target, other)} for name, other in made.items()}
    results["original"] = {"own": drafter.statistics is mine, **compare(target, drafter)}
    return results


def resave(job) -> dict:
    """Save a remotely loaded drafter into a new folder, twice, and one into the folder it was loaded from."""
    drafter = load_drafter(job["drafter"])
    compare(load_target(job), drafter)  # in use before it is saved
    for _ in range(2):
        drafter.save_pretrained(job["resaved"])
    if "inplace" in job:
        shutil.copytree(job["drafter"], job["inplace"])
        load_drafter(job["inplace"]).save_pretrained(job["inplace"])
    return {}


def shim(job) -> dict:
    """The `custom_generate=` spelling and `decode_for`, with what `generate` takes besides ids."""
    drafter, target = load_drafter(job["drafter"]), load_target(job)
    text = target.generate(prompt(), generation_config=greedy())[0, len(PROMPT[0]) :].tolist()
    inputs = {"input_ids": prompt(), "attention_mask": prompt().ne(-1).long()}
    keywords = {**inputs, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    ending = {**keywords, "stop_strings": ["".join(ALPHABET[i] for i in text[20:23])], "tokenizer": tokenizer()}
    rich = {**inputs, "generation_config": greedy(return_dict_in_generate=True, output_scores=True)}
    trusted = {"custom_generate": job["drafter"], "trust_remote_code": True}
    ways = {
        "shim": lambda **kw: target.generate(**kw, assistant_model=drafter, **trusted),
        "decode_for": lambda **kw: drafter.decode_for(target, **kw),
    }
    results = {}
    for name, run in ways.items():
        # `ways` is done with before the next turn, so the late binding of `run` is right.
        result = results[name] = compare(target, drafter, lambda: run(**inputs, generation_config=greedy()))
        result["keywords"] = run(**keywords).tolist() == target.generate(**keywords).tolist()

        streams: tuple[list, list] = [], []
        target.generate(**keywords, streamer=streamer(streams[0]))
        run(**keywords, streamer=streamer(streams[1]))
        result["streams"] = streams[0] == streams[1] and streams[1][-1] == "end"

        plain, ours = target.generate(**ending), run(**ending)
        result["stopped"] = plain.tolist() == ours.tolist() and drafter.statistics.drafted > 0
        result["stopped_after"] = ours.shape[1] - len(PROMPT[0])

        plain, ours = target.generate(**rich), run(**rich)
        close = [bool((a - b).abs().max() < 1e-3) for a, b in zip(plain.scores, ours.scores)]
        result["dict"] = plain.sequences.tolist() == ours.sequences.tolist() and all(close)
        result["scores"] = [len(plain.scores), len(ours.scores)]
    return results


def switched_off(job) -> dict:
    """With the off switch the host's class is as it was; and what `generate` answers to a drafter then."""
    from transformers import GenerationMixin

    before = dict(vars(GenerationMixin))
    drafter, target = load_drafter(job["drafter"]), load_target(job)
    attributes = set(vars(target))
    drafter.decode_for(target, inputs=prompt(), generation_config=greedy())
    try:
        target.generate(prompt(), assistant_model=drafter, generation_config=greedy())
        message = "no error"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    untouched = dict(vars(GenerationMixin)) == before
    return {"untouched": untouched, "left_on_target": sorted(set(vars(target)) - attributes), "message": message}


def mixed(job) -> dict:
    """Drafters of several code versions and of the package: loaded in the given order, used in turn, saved."""
    from transformers import GenerationMixin

    target = load_target(job)
    drafters, hooks, roots = {}, [], {}
    for name, source, revision in job["sources"]:
        if name == "installed":
            drafters[name] = importlib.import_module("dspark.modeling_dspark").DSparkModel.from_pretrained(source)
        else:
            drafters[name] = load_drafter(source, **({"revision": revision} if revision else {}))
        roots[name] = type(drafters[name]).__module__.split(".")[0]
        hooks.append(GenerationMixin._assisted_decoding)
    turns = [{name: compare(target, drafter) for name, drafter in drafters.items()} for _ in range(2)]
    for name, drafter in drafters.items():
        drafter.save_pretrained(Path(job["saved"], name))
    return {"roots": roots, "one_hook": len({id(h) for h in hooks}) == 1, "hook_depth": hook_depth(), "turns": turns}


def together(job) -> dict:
    """Four processes start at the same moment with cold caches, load the drafter and decode.

    The host copies code files into its module cache without a lock, so a process may meet one that another is still
    writing; who loses that race is started again.
    """
    import torch

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    target = load_target(job)
    folder = Path(job["cold"], "drafter")  # the module cache goes by a folder's name
    shutil.copytree(job["drafter"], folder)
    os.environ["DSPARK_CACHE"] = str(Path(job["cold"], "tables"))
    drafter_names = set(sys.modules)

    def child(barrier, answers):
        try:
            barrier.wait(60)
            drafter = load_drafter(folder)
        except BaseException:
            answers.put({"lost": traceback.format_exc()})
            return
        try:
            fresh = type(drafter).__module__ not in drafter_names
            answers.put({"fresh": fresh, **compare(target, drafter, dspark_schedule="throughput")})
        except BaseException:
            answers.put({"failed": traceback.format_exc()})

    def start(count):
        barrier, answers = context.Barrier(count), context.SimpleQueue()
        children = [context.Process(target=child, args=(barrier, answers)) for _ in range(count)]
        for process in children:
            process.start()
        found = [answers.get() for _ in children]
        for process in children:
            process.join(60)
        return found

    first = start(4)
    lost = [answer for answer in first if "lost" in answer]
    again = start(len(lost)) if lost else []
    tables = [json.loads(file.read_text()) for file in Path(os.environ["DSPARK_CACHE"]).iterdir()]
    return {"answers": [a for a in first if "lost" not in a] + again, "first": len(first), "tables": len(tables)}


STEPS = (isolation, load, load_half, load_untrusted, copies, resave, shim, switched_off, mixed, together)


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    attempts: list = []
    if job["isolated"]:
        hide_other_packages()
    cut_network(attempts)
    steps = {step.__name__: step for step in STEPS}
    results = {}
    for name, own in job["steps"]:
        started = time.perf_counter()
        try:
            result = steps[name]({**job, **own})
        except Exception:
            result = {"error": traceback.format_exc()}
        results[own.get("as", name)] = {**result, "seconds": round(time.perf_counter() - started, 2)}
    imported = sorted(m for m in sys.modules if m.partition(".")[0] in OURS)
    Path(job["result"]).write_text(json.dumps({**results, "attempts": attempts, "imported": imported}))


if __name__ == "__main__":
    main(sys.argv[1])
