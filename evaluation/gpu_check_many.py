"""The part of `make gpu-check` that is about many requests at once; see `gpu_check`."""

import time


CONCURRENCIES = (1, 4, 16, 64, 128)


def check_batches(helpers, families, device: str, tokens: int) -> list[dict]:
    """A left-padded batch with a drafter against the same batch without, in fp32."""
    import torch

    found = []
    for name in families:
        target = helpers.make_target(name).to(device)
        drafter = helpers.make_drafter(target).to(device)
        ids = torch.randint(3, helpers.VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        for row, padding in enumerate((0, 5, 9, 2)):
            ids[row, :padding], mask[row, :padding] = 0, 0
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        plain = target.generate(**inputs, generation_config=helpers.config(max_new_tokens=tokens))
        settings = helpers.config(max_new_tokens=tokens, dspark_schedule="fixed")
        out = target.generate(**inputs, generation_config=settings, assistant_model=drafter)
        ok = torch.equal(out, plain) and drafter.statistics.drafted > 0
        found.append({"check": f"batch of 4, {name}", "ok": bool(ok), "drafted": drafter.statistics.drafted})
    return found


def load_curves(target, drafter, prompts: list[list[int]], concurrencies, tokens: int, deadline: float) -> list[dict]:
    """`dspark load` without its table of modes: plain batches, no drafts, whole blocks, the schedule."""
    from dspark.evaluation import load
    from dspark.evaluation.benchmark import generation_settings

    runs = []
    for concurrency in concurrencies:
        for mode in ("plain", "none", "fixed 7", "bridging"):
            if time.perf_counter() > deadline:
                return runs
            part = prompts[:concurrency]
            run = load.measure(target, drafter, part, generation_settings(target, tokens), [concurrency], [mode])[0]
            print(load.line(run), flush=True)
            runs.append(run)
    return runs


def many_requests(target, drafter, deadline: float) -> dict:
    """The packed step beside its parts, and load curves, on random prompts."""
    import torch

    from dspark.evaluation import packed_cost

    concurrencies = CONCURRENCIES if target.device.type == "cuda" else CONCURRENCIES[:2]
    drafter.cost_table = None
    packed = packed_cost.measure(target, drafter, rounds=5)
    parts, padded = packed["ragged_ratio"], packed["ones_ratio"]
    print(f"packed step: {parts:.2f} x its parts, {padded:.2f} x a left-padded batch step")
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, target.config.vocab_size - 5, (max(concurrencies), 96), generator=random).tolist()
    prompts = [prompt[: 32 + 64 * (i % 2)] for i, prompt in enumerate(prompts)]
    return {"packed": packed, "load": load_curves(target, drafter, prompts, concurrencies, 32, deadline)}


def shipped_load(deadline: float) -> list[dict] | None:
    """Load curves with the shipped drafter on the demo's prompts, `None` where its target was not converted."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dspark.evaluation import demo, smollm2
    from dspark.evaluation.inputs import load_drafter, read_prompts, tokenize

    folder = smollm2.cache_folder() / smollm2.FOLDER
    if not (folder / "config.json").is_file() or not demo.DRAFTER.is_dir() or time.perf_counter() > deadline:
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    drafter = load_drafter(demo.DRAFTER, False, dtype=target.dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenize(tokenizer, row, "cpu")["input_ids"][0].tolist() for row in read_prompts(demo.PROMPTS)]
    prompts = (rows * max(CONCURRENCIES))[: max(CONCURRENCIES)]
    return load_curves(target, drafter, prompts, CONCURRENCIES, 64, deadline)
