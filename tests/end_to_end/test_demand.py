"""The documents that this program was asked for by: every block of code, command and name in them is typed in, adapted
in what it imports, and either runs or ends in a sentence that says what to write instead.

The fifth document, custom_backend_guide.md, has its tests in test_plugin_guides.py.
"""

import contextlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import backend_manager
from anyqlora import Runtime, distribution
from anyqlora.config.accelerate_environment import from_accelerates_environment
from anyqlora.config.resolve import canonical_argv, resolve
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.distribution import keras as placed
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.machine import Machine
from anyqlora.testing import world
from tests.support import documents
from tests.support.paths import MACHINES, ROOT

GUIDES = ROOT / "tests" / "support" / "guides"
NAMES = ("accelerate_analysis", "accumulation_boundary", "backend_agnostic_distribution", "backend_support")
DOCUMENTS = {name: documents.read(GUIDES / f"{name}.md") for name in NAMES}


def blocks(name: str) -> list[str]:
    """The fenced blocks of a document."""
    return re.findall(r"^```\w+\n(.*?)^```", DOCUMENTS[name].text, re.MULTILINE | re.DOTALL)


def section(name: str, heading: str) -> str:
    return DOCUMENTS[name].text.partition(heading)[2].partition("\n#")[0]


def code(text: str) -> list[str]:
    """What stands between backticks."""
    return list(dict.fromkeys(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)))


# ------------------------------------------------------------------------------- accumulation_boundary: loops, typed in


class Output(torch.nn.Module):
    """A model whose outputs have a loss, as those of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, batch):
        return types.SimpleNamespace(loss=F.cross_entropy(self.layer(batch[0]), batch[1]))


def rows(count=16):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.randint(0, 2, (count,), generator=generator))


def place(**settings):
    """The names that a block leaves to its reader, and `runtime`, `layer`: what it is to be asked for afterwards."""
    settings = {"strategy": "single", "backend": "cpu", "precision": "fp32", **settings}
    model = Output()
    dataloader = DataLoader(rows(), 4)
    batch = next(iter(dataloader))
    return {
        "Accelerator": lambda: Runtime.of(**settings),
        "model": model,
        "layer": model.layer,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "dataloader": dataloader,
        "micro_batches": [batch, batch],
        "custom_split_batch": lambda batch: [[x[:2] for x in batch], [x[2:] for x in batch]],
        "advanced_batch_processing": lambda batch: [[x[:2] for x in batch], [x[2:] for x in batch]],
        "get_dynamic_accumulation_steps": lambda step: 1 + step % 2,
        "get_micro_batch": lambda batch, i: [x[i : i + 2] for x in batch],
        "should_step_optimizer": lambda index, micro_batch, outputs: index == 1,
    }


def typed(number: int, names: dict, after: str = "") -> dict:
    """A block of accumulation_boundary, with `accelerator` made where it takes one as made."""
    text = blocks("accumulation_boundary")[number]
    own = "from accelerate import Accelerator\n"
    head = (
        "" if own in text else "accelerator = Accelerator()\nmodel, optimizer = accelerator.prepare(model, optimizer)\n"
    )
    exec(compile(head + text.replace(own, "") + after, "accumulation_boundary.md", "exec"), names)
    return names


STEP = "\noptimizer.step()\noptimizer.zero_grad()\n"
ONE = "loss = model(micro_batches[0]).loss\n"
SILENT = {  # block -> what calls it, where it is a function
    1: "",  # method 1
    2: "",  # method 2
    6: "",  # a custom schedule
    7: "",  # a number of micro-batches that changes
    8: "for batch in dataloader:\n    custom_training_step(accelerator, model, batch)\n",
    9: "for last in (False, True, False, True):\n"
    "    backward_with_accumulation(accelerator, model, model(micro_batches[0]).loss, last)\n",
}


@pytest.mark.parametrize("number", SILENT)
def test_a_loop_that_never_steps_ends_in_the_verb_that_does(number):
    """As they stand they train nothing, and under Accelerate only DeepSpeed's engine steps."""
    names = place()
    before = names["layer"].weight.detach().clone()
    with pytest.raises(UsageError, match="no step was taken") as refused:
        typed(number, names, SILENT[number])
    assert "optimizer_step_and_zero_grad" in refused.value.cure and torch.equal(names["layer"].weight, before)


@pytest.mark.parametrize("number", SILENT)
def test_the_same_loop_with_the_verb_trains(number):
    """The cure is typed in where the boundary is: after each backward that is one."""
    names = place()
    before = names["layer"].weight.detach().clone()
    text, called = blocks("accumulation_boundary")[number], SILENT[number]
    text = text.replace("from accelerate import Accelerator\n", "")
    step = "accelerator.optimizer_step_and_zero_grad(optimizer=optimizer, model=model)"
    text = re.sub(
        r"^( *)(accelerator\.backward\(.*\))$",
        rf"\1\2\n\1if accelerator.sync_gradients:\n\1    {step}",
        text,
        flags=re.M,
    )
    head = (
        ""
        if "accelerator = " in text
        else "accelerator = Accelerator()\nmodel, optimizer = accelerator.prepare(model, optimizer)\n"
    )
    exec(compile(head + text + called, "accumulation_boundary.md", "exec"), names)
    names["accelerator"].end_training()
    assert not torch.equal(names["layer"].weight, before)


def method_3(settings):
    names = typed(3, place(**settings))
    return names["grad_norm"], names["layer"].weight.detach().numpy().copy()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_method_3_is_the_loop_of_plain_torch(accumulated, capsys):
    norm, weight = method_3({"gradient_accumulation_steps": accumulated})
    model = Output()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, batch in enumerate(DataLoader(rows(), 4), 1):
        (model(batch).loss / accumulated).backward()
        if number % accumulated == 0:
            expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(), optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(weight), model.layer.weight, rtol=0, atol=1e-6)
    assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    assert capsys.readouterr().out.count("Gradient norm: ") == 4 // accumulated


@pytest.mark.distributed
@pytest.mark.parametrize("settings", [{"strategy": "ddp"}, {"strategy": "deepspeed", "deepspeed_zero_stage": 2}])
def test_method_3_on_two_processes_is_one_big_batch(settings):
    settings["gradient_accumulation_steps"] = 2
    first, second = world(2, method_3, settings)
    model = Output()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(rows().tensors).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for norm, weight in (first, second):
        torch.testing.assert_close(torch.tensor(weight), model.layer.weight, rtol=0, atol=1e-6)
        assert float(norm) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(("number", "steps"), [(4, [True]), (5, [True, False]), (10, [True])])
def test_a_backward_alone_is_a_boundary_as_it_says(number, steps):
    """Each line by itself: whether gradients are whole after it, and the step then moves the weights."""
    lines = [line for line in blocks("accumulation_boundary")[number].splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(steps)
    for line, is_boundary in zip(lines, steps, strict=True):
        names = place() | {"is_final_micro_batch": True}
        names |= {"accelerator": (runtime := names["Accelerator"]())}
        names["model"], names["optimizer"] = runtime.prepare(names["model"], names["optimizer"])
        before = names["layer"].weight.detach().clone()
        exec(ONE + line + STEP, names)
        assert torch.equal(names["layer"].weight, before) is not is_boundary


def engine(settings):
    """The first block, which calls DeepSpeed's engine by itself where DeepSpeed runs."""
    names = place(**settings)
    runtime = names["Accelerator"]()
    names["model"], names["optimizer"] = runtime.prepare(names["model"], names["optimizer"])
    names |= {"get_accelerator": lambda: runtime, "using_deepspeed": settings["strategy"] == "deepspeed"}
    exec(blocks("accumulation_boundary")[0], names)
    loss = names["model"](names["micro_batches"][0]).loss
    try:
        names["backward"](loss, is_final_micro_batch=True)
    except UsageError as error:
        return f"{error} {error.cure}"
    names["optimizer"].step()
    return names["layer"].weight.detach().numpy().copy()


@pytest.mark.distributed
def test_the_conditional_code_runs_or_names_the_verb():
    weights = engine({"strategy": "single"})
    assert not (weights == Output().layer.weight.detach().numpy()).all()
    sentence = world(2, engine, {"strategy": "deepspeed", "deepspeed_zero_stage": 2})[0]
    assert "runtime.set_gradient_accumulation_boundary(is_boundary)" in sentence


# ------------------------------------------------------------------------------------ backend_support: what is typed in

ON = {path.stem: Machine.from_dict(json.loads(path.read_text())["machine"]) for path in MACHINES.glob("*.json")}


def commands() -> list[str]:
    """Each command of the document's blocks as one line, with the variables that are exported before it."""
    found, exported = [], []
    for text in blocks("backend_support"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("export "):
                exported.append(line.removeprefix("export "))
            elif re.match(r"(python|pip) ", line):
                found.append(" ".join([*exported, *line.split()]))
                exported = []
    return found if not exported else [*found, " ".join([*exported, "python train.py"])]


def planned(line: str, machine: str):
    """The plan of a command on a recorded machine, with an embedded model in place of one of the hub."""
    words = shlex.split(line.replace("meta-llama/Llama-2-7b-hf", "demo"))
    start = words.index("train.py") + 1
    environ = dict(word.split("=", 1) for word in words[: start - 2])
    pairs = (word.removeprefix("--").partition("=") for word in canonical_argv(words[start:]))
    config = resolve({name.replace("-", "_"): value for name, _, value in pairs}, environ=environ)
    where = config.sources.get("backend", "")
    return BackendManager(config.backend, machine=ON[machine], where=where).plan(config)


RUNS = [  # command -> [(machine, the backend that it is planned on, or what is said)]
    ("python train.py --backend auto", [("a100", "cuda"), ("m3", "mlx"), ("rx7900", "rocm")]),
    ("python train.py --backend cuda", [("a100", "cuda"), ("m3", "Backend 'cuda' is not available")]),
    ("python train.py --backend mps", [("m3", "mps"), ("a100", "Backend 'mps' is not available")]),
    ("python train.py --backend mlx", [("m3", "mlx"), ("a100", "Backend 'mlx' is not available")]),
    ("python train.py --backend cpu", [("a100", "cpu"), ("m3", "cpu")]),
    (
        "python train.py --backend mps --model_name meta-llama/Llama-2-7b-hf --train_type qlora --batch_size 2 "
        "--precision fp16_autocast --num_epochs 1",
        [("m3", "mps")],
    ),
    ("pip install mlx", []),
    (
        "python train.py --backend mlx --model_name meta-llama/Llama-2-7b-hf --train_type qlora --world_size 1 "
        "--batch_size 4",
        [("m3", "mlx")],
    ),
    ("FSDP_BACKEND=mps python train.py", [("m3", "mps"), ("a100", "FSDP_BACKEND: Backend 'mps' is not available")]),
    ("FSDP_BACKEND=auto CUDA_VISIBLE_DEVICES=0,1 python train.py", [("a100", "cuda")]),
]


def test_all_commands_of_the_document_are_here():
    assert commands() == [line for line, _ in RUNS]


@pytest.mark.parametrize(("line", "machines"), RUNS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_is_planned_or_answered(line, machines):
    for machine, expected in machines:
        if " " not in expected:
            assert planned(line, machine).config.backend == expected
            continue
        with pytest.raises(UsageError) as refused:
            planned(line, machine)
        assert expected in str(refused.value) and "--backend auto" in refused.value.cure


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--backend auto", "backend", "auto"),
        ("--precision fp16", "precision", "fp16_autocast"),
        ("--world_size 1", "world_size", 1),
        ("--use_gradient_checkpointing", "use_gradient_checkpointing", True),
        ("--low_memory", "low_memory", True),
    ],
)
def test_the_cures_of_its_troubleshooting_are_flags(flags, name, value):
    pairs = (word.removeprefix("--").partition("=") for word in canonical_argv(flags.split()))
    given = {name.replace("-", "_"): value for name, _, value in pairs}
    assert getattr(resolve({"model_name": "demo", "dataset": "demo", **given}, environ={}), name) == value


def test_all_those_cures_are_here():
    cures = code(DOCUMENTS["backend_support"].text.partition("## Troubleshooting")[2])
    assert [cure for cure in cures if cure.startswith("--")] == [
        *("--backend auto", "--precision fp16", "--world_size 1", "--use_gradient_checkpointing", "--low_memory")
    ]


def test_its_python_runs(capsys):
    manager, custom = [text for text in blocks("backend_support") if "import BackendManager" in text]
    exec(manager, {})
    said = capsys.readouterr().out
    assert "Backend: " in said and "Quantizers: " in said
    names: dict = {}
    with contextlib.suppress(UserWarning):
        exec(custom, names)
    assert isinstance(names["batch_size"], int) and names["batch_size"] >= 1
    assert ("4-bit quantization available!" in capsys.readouterr().out) == names["manager"].supports_quantization(4)


def test_what_its_contributors_edit_is_there_or_has_a_row_on_the_page():
    edited = code(section("backend_support", "## Contributing"))
    rows = " ".join(cell for row in documents.page("writing-a-backend.md").rows(below="## Coming from") for cell in row)
    assert len(edited) == 6 and all(f"`{name}`" in rows for name in edited)
    assert backend_manager.Backend("cuda") and "cuda" in backend_manager.CAPABILITIES


# ------------------------------------------------------------------------ accelerate_analysis: names of its settings

BASE = {"model_name": "demo", "dataset": "demo"}
PARAMETERS = {  # name: (value, setting, what it is)
    "distributed_type": ("FSDP", "strategy", "fsdp"),
    "num_processes": ("2", "world_size", 2),
    "mixed_precision": ("bf16", "precision", "bf16"),
    "gradient_accumulation_steps": ("4", "gradient_accumulation_steps", 4),
    "fsdp_sharding_strategy": ("SHARD_GRAD_OP", "sharding_strategy", "shard_grad_op"),
    "deepspeed_zero_stage": ("3", "deepspeed_zero_stage", 3),
    "main_process_ip": ("10.0.0.1", "master_addr", "10.0.0.1"),
    "main_process_port": ("29501", "master_port", "29501"),
    "find_unused_parameters": ("true", "find_unused_parameters", True),
    "cpu_ram_efficient_loading": ("true", "low_memory", True),
    "zero_stage": ("1", "deepspeed_zero_stage", 1),
    "offload_optimizer_device": ("cpu", "strategy_opt", "offload_optimizer=true"),
    "offload_param_device": ("none", "use_cpu_offload", False),
    "sharding_strategy": ("full_shard", "sharding_strategy", "full_shard"),
    "cpu_offload": ("true", "use_cpu_offload", True),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "strategy", "auto"),
    "tp_degree": ("2", "mesh", "model=2"),
    "pp_degree": ("1", "strategy", "auto"),
    "num_micro_batches": ("4", "gradient_accumulation_steps", 4),
}
REFUSED = {"mixed_precision": "fp8", "distributed_type": "MEGATRON_LM", "pp_degree": "2", "auto_wrap_policy": "NO_WRAP"}


def test_all_its_settings_are_here():
    text = section("accelerate_analysis", "#### **6. [06_Configuration_Reference.md]")
    critical, plugins = text.partition("- **Backend-Specific Plugins:**")[::2]
    fields = re.findall(r"Plugin \((.*?)\)", plugins)
    assert list(PARAMETERS) == [*code(critical), *(name.strip() for names in fields for name in names.split(","))]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_setting_of_accelerates_is_one_here(name):
    value, setting, expected = PARAMETERS[name]
    assert getattr(resolve({**BASE, name: value}, environ={}), setting) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_offered_has_a_cure(name):
    with pytest.raises(NotSupported) as refused:
        resolve({**BASE, name: REFUSED[name]}, environ={})
    assert "not offered" in str(refused.value) + refused.value.cure or name == "auto_wrap_policy"
    assert refused.value.cure


def test_its_variables_count():
    """Those of the processes are read where processes are made (tests/processes); Accelerate's own are settings."""
    text = section("accelerate_analysis", "#### **6. [06_Configuration_Reference.md]")
    variables = code(text.partition("- **Environment Variables:**")[2].partition("- **Configuration File")[0])
    of_processes = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    accelerates = {
        "ACCELERATE_MIXED_PRECISION": ("bf16", {"precision": "bf16"}),
        "ACCELERATE_USE_DEEPSPEED": ("true", {"strategy": "deepspeed"}),
        "ACCELERATE_USE_FSDP": ("true", {"strategy": "fsdp"}),
    }
    assert variables == [*of_processes, *accelerates]
    for variable, (value, expected) in accelerates.items():
        layer = from_accelerates_environment({variable: value}, notes := [])
        assert {name: stated for name, (stated, _) in layer.items()} == expected and not notes


def test_code_counts_more_than_the_environment_and_that_more_than_a_file(tmp_path):
    """Its Configuration Precedence; its Accelerator(mixed_precision="fp16") is Runtime.of's."""
    (tmp_path / "config.yaml").write_text("compute_environment: LOCAL_MACHINE\nmixed_precision: fp16\n")
    file, environ = {"config": str(tmp_path / "config.yaml")}, {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert resolve({**BASE, **file}, environ={}).precision == "fp16_autocast"
    assert resolve({**BASE, **file}, environ=environ).precision == "bf16"
    assert resolve({**BASE, **file, "mixed_precision": "no"}, environ=environ).precision == "fp32"
    assert Runtime.of(mixed_precision="no", cpu=True, strategy="single").plan.config.precision == "fp32"


# --------------------------------------------------------------------- backend_agnostic_distribution: Keras's functions


def test_its_functions_are_there_with_their_arguments():
    listed = re.findall(r"^- `(\w+)\((.*?)\)`", DOCUMENTS["backend_agnostic_distribution"].text, re.MULTILINE)
    assert len(listed) == 9
    for name, arguments in listed:
        count = len(arguments.split(",")) if arguments else 0
        inspect.signature(getattr(placed, name)).bind(*range(count))
    assert {name for name, _ in listed if not name.startswith("_")} <= {*distribution.__all__}


@pytest.mark.distributed
def test_its_edit_of_keras_is_what_install_does():
    """The block's last import, typed in as it stands after install(); Keras itself is not edited."""
    (edit,) = blocks("backend_agnostic_distribution")
    (line,) = [line.strip() for line in edit.splitlines() if "import distribution_lib" in line]
    program = (
        "from anyqlora.distribution.keras import install\ninstall()\n"
        f"{line}\nimport keras\n"
        "from keras.src import backend\n"
        "assert backend.distribution_lib is distribution_lib\n"
        "print(distribution_lib.num_processes(), distribution_lib.list_devices('gpu'))\n"
    )
    environ = {**os.environ, "KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.stdout.split("\n")[-2] == "1 []", done.stderr[-2000:]


def test_everything_is_counted():
    """Blocks, commands, cures, names: what the five documents ask somebody to type."""
    of_fifth = [one for one in documents.read(GUIDES / "custom_backend_guide.md").blocks() if one[0]]
    counts = {
        "blocks": sum(len(blocks(name)) for name in NAMES) + len(of_fifth),
        "commands": len(RUNS),
        "cures": 5,
        "settings": len(PARAMETERS),
        "variables": 8 + 2,  # with FSDP_BACKEND and CUDA_VISIBLE_DEVICES
        "functions": 9,
        "places to edit": 6,
    }
    assert counts["blocks"] == 29 and sum(counts.values()) == 88, counts
