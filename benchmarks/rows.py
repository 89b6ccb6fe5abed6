"""How long until the rows of a large file are tokens, and what they take: ours and Hugging Face's `datasets.map`.

    python benchmarks/rows.py --rows 100000 --tokenizer PATH [--peer true]

Chat rows of two turns and about 200 tokens, made here. `--tokenizer` is a directory with a chat template. Prints the
seconds of the first start (nothing is kept yet), of the second (all is), and of the peer on the same rows and template
with as many processes; resident memory that is not of mapped files; and writes them as JSON.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
WORDS = [begin + end for begin in "bdfgklmnprst" for end in ("a", "en", "is", "or", "um")]


def make(path: Path, rows: int) -> None:
    """Write the rows."""
    draw = random.Random(0)

    def says(role: str, words: int) -> dict:
        return {"role": role, "content": " ".join(draw.choices(WORDS, k=words))}

    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            turns = [says("user", 30), says("assistant", 50), says("user", 30), says("assistant", 60)]
            file.write(json.dumps({"messages": turns}) + "\n")


def anonymous_bytes() -> int:
    """Resident memory of this process that is not of mapped files."""
    with open("/proc/self/status", encoding="ascii") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def ours(path: str, tokenizer: str, processes: int) -> dict:
    from transformers import AutoTokenizer

    from anyqlora.config.resolve import resolve
    from anyqlora.data import dataset, stream

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    asked = {"model_name": tokenizer, "dataset": path, "context_length": 2048, "dataset_num_proc": processes}
    before, began = anonymous_bytes(), time.perf_counter()
    data = dataset.load_data(resolve(asked, environ={}), tokens)
    loaded = time.perf_counter() - began
    options = {"batch_size": 8, "gradient_accumulation_steps": 1, "num_epochs": 1, "max_steps": 0, "seed": 1}
    batches = stream.BatchStream(data.train, **options, packing=False, context_length=2048, pad_id=0)
    began = time.perf_counter()
    assert batches[len(batches) // 2]
    return {
        "seconds": loaded + time.perf_counter() - began,
        "memory": anonymous_bytes() - before,
        "tokens": data.report["train"]["tokens"],
    }


def peer(path: str, tokenizer: str, processes: int) -> dict:
    import datasets
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    datasets.disable_progress_bars()
    tokens = AutoTokenizer.from_pretrained(tokenizer)
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
        rows.map(lambda row: tokens.apply_chat_template(row["messages"], return_dict=True), num_proc=processes)
        return {"seconds": time.perf_counter() - began}


def main() -> None:
    asked = {"rows": "100000", "tokenizer": "", "peer": "true", "processes": str(os.cpu_count())}
    words = iter(sys.argv[1:])
    asked |= {word.removeprefix("--"): next(words) for word in words}
    if "part" in asked:
        part = {"ours": ours, "peer": peer}[asked["part"]]
        print(json.dumps(part(asked["path"], asked["tokenizer"], int(asked["processes"]))))
        return
    rows = int(asked["rows"])
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "rows.jsonl"
        make(path, rows)

        def run(part: str) -> dict:
            """In a process of its own."""
            command = [sys.executable, __file__, "--part", part, "--path", str(path), "--processes", asked["processes"]]
            environ = os.environ | {"XDG_CACHE_HOME": str(Path(place) / "cache")}
            out = subprocess.run(
                [*command, "--tokenizer", asked["tokenizer"]], env=environ, capture_output=True, text=True, check=True
            )
            return json.loads(out.stdout.splitlines()[-1])

        found = {"rows": rows, "bytes": path.stat().st_size, "processes": int(asked["processes"])}
        found |= {"first": run("ours"), "second": run("ours")}
        if asked["peer"] == "true":
            found["datasets.map"] = run("peer")
            found["ratio"] = found["first"]["seconds"] / found["datasets.map"]["seconds"]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
