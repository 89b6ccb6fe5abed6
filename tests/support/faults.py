"""The faults: each is called in a trial's child before its run begins."""

import errno
import json
import os
import resource
import signal
import time
import types

import torch

import anyqlora.on_torch.assembly.build as building
from anyqlora.core import files
from anyqlora.core.files import FileSystem, chunks
from anyqlora.training.session import TrainingSession

CALLS = ("make_directory", "write", "rename", "sync_directory", "remove")
CRASHED = 86


# ------------------------------------------------------------------------------------------------------ the file system


def each_call(act) -> None:
    """`act(number, name, paths, content, do)` in the place of every file-system call of the seam; `do()` is the call
    itself.
    """
    number = iter(range(10**9))

    def wrapped(name, method):
        def call(self, *arguments):
            paths = [a for a in arguments if not isinstance(a, (bytes, list))]
            content = next((b"".join(chunks(a)) for a in arguments if isinstance(a, (bytes, list))), None)
            return act(next(number), name, paths, content, lambda: method(self, *arguments))

        return call

    for name in CALLS:
        setattr(FileSystem, name, wrapped(name, getattr(FileSystem, name)))


def record_calls(path: str) -> None:
    """Write every call as a line: [number, name, the file's or directory's name, in which directory]."""

    def act(number, name, paths, content, do):
        with open(path, "a") as file:
            file.write(json.dumps([number, name, paths[0].name, paths[0].parent.name]) + "\n")
        return do()

    each_call(act)


def record_work(path: str) -> None:
    """Write as a line what each call of the seam, and each hash of a piece of a file, has to do: [what, of what,
    bytes].
    """

    def note(*line):
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def act(number, name, paths, content, do):
        inside = f"{paths[0].name} in {paths[0].parent.name}" if name == "write" else paths[0].name
        note(name, inside, len(content or b""))
        return do()

    class Counted:
        def __init__(self, content=b""):
            self.digest = sha256(content)
            note("hash", "", len(content))

        def update(self, content):
            note("hash", "", len(content))
            self.digest.update(content)

        def hexdigest(self):
            return self.digest.hexdigest()

    sha256 = files.hashlib.sha256
    files.hashlib = types.SimpleNamespace(sha256=Counted)
    each_call(act)


def slow_disk(seconds: float) -> None:
    """Every call takes so much longer, so that a signal finds the run inside a save."""

    def act(number, name, paths, content, do):
        time.sleep(seconds)
        return do()

    each_call(act)


def crash_at(call: int, moment: str) -> None:
    """End the process before, in the middle of, or after a call."""

    def act(number, name, paths, content, do):
        if number != call:
            return do()
        if moment == "after":
            do()
        elif moment == "middle":
            half(name, paths[0], content)
        os._exit(CRASHED)

    each_call(act)


def full_at(first: int, last: int, also_half: bool = True) -> None:
    """The disk is full at the calls from `first` to `last`: half of a file goes in."""

    def act(number, name, paths, content, do):
        if first <= number <= last and name in ("make_directory", "write", "rename"):
            if name == "write" and also_half:
                half(name, paths[0], content)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return do()

    each_call(act)


def half(name: str, path, content: bytes | None) -> None:
    """Half of a call's work: half of a file written, half of a directory's files removed."""
    if name == "write":
        path.write_bytes(content[: len(content) // 2])
    elif name == "remove":
        files = sorted(path.iterdir()) if path.is_dir() else []
        for file in files[: len(files) // 2]:
            file.unlink()


def limit_files(size: int, step: int) -> None:
    """No file may grow beyond `size` bytes from `step` on: the kernel's own "no"."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    at_step(lambda now: now == step and resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)))


def fill_disk(path: str, first: int, last: int, left: int) -> None:
    """From step `first` on somebody else fills the file system of `path` up to `left` bytes, and frees it at step
    `last`.
    """

    def act(step):
        filler = os.path.join(path, "filler")
        if step == first:
            about = os.statvfs(path)
            with open(filler, "wb") as file:
                file.write(bytes(max(about.f_bavail * about.f_frsize - left, 0)))
        if step == last:
            os.remove(filler)

    at_step(act)


# ------------------------------------------------------------------------------------------------------------- the loop


def at_step(act) -> None:
    """`act(step)` (from 0) when the loop asks for the step's batches."""
    batches = TrainingSession.batches

    def called(self, step):
        act(step)
        return batches(self, step)

    TrainingSession.batches = called


def signal_at(step: int, number: int, times: int = 1) -> None:
    """A signal in the middle of a step."""
    at_step(lambda now: step <= now < step + times and os.kill(os.getpid(), number))


def resize_at(step: int, size: int) -> None:
    """Be told to go on with micro-batches of `size` rows."""
    batches = TrainingSession.batches

    def called(self, now):
        if now == step:
            self.stream.resize(size)
        return batches(self, now)

    TrainingSession.batches = called


def with_model(act) -> None:
    """`act(built)` when the model has been built."""
    build = building.build

    def built(*arguments):
        made = build(*arguments)
        act(made)
        return made

    building.build = built


def poison(where: str, steps: list[int], values: list[float]) -> None:
    """In each of `steps` (from 0) put a value into the loss (the head's input), one activation, or one gradient of the
    first micro-batch.
    """
    now = {"value": None}

    def begin(step):
        now["value"] = values[steps.index(step)] if step in steps else None

    def once(tensor):
        """A copy of the tensor with one poisoned element, the first time in a poisoned step."""
        if now["value"] is None:
            return None
        tensor = tensor.clone()
        tensor.view(-1)[tensor.numel() // 2] = now["value"]
        now["value"] = None
        return tensor

    def attach(built):
        model = built.model
        if where == "gradient":
            next(iter(built.trainable.values())).register_hook(once)
        elif where == "activation":
            name = next(n for n, _ in model.named_modules() if n.endswith("mlp.down_proj"))
            model.get_submodule(name).register_forward_hook(
                lambda module, _, out: once(out) if module.training else None
            )
        else:
            model.lm_head.register_forward_pre_hook(lambda module, given: _spoilt(given[0], now))

    at_step(begin)
    with_model(attach)


def _spoilt(hidden, now):
    """All that the output head sees of a micro-batch, so that a trained token is among it."""
    if now["value"] is None or not torch.is_grad_enabled():
        return None
    value, now["value"] = now["value"], None
    return hidden * value if value != value else hidden + torch.full_like(hidden, value)


def run_out(largest: int, from_step: int = 0) -> None:
    """Out of memory in a forward pass whenever a micro-batch has more than `largest` rows."""
    now = {"step": 0}
    at_step(lambda step: now.update(step=step))

    def check(module, inputs, named):
        positions = named.get("position_ids")
        documents = 0 if positions is None else int((positions == 0).sum())  # rows may lie one after another, in one
        if max(inputs[0].shape[0], documents) > largest and now["step"] >= from_step and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with_model(
        lambda built: built.model.get_submodule(_first_block(built.model)).register_forward_pre_hook(
            check, with_kwargs=True
        )
    )


def run_out_backward(step: int, micro_batch: int) -> None:
    """Out of memory once, in the middle of the backward pass of one micro-batch."""
    now = {"step": 0, "passes": 0}
    at_step(lambda current: now.update(step=current, passes=0))

    def check(module, gradient):
        now["passes"] += 1
        if now["step"] == step and now["passes"] == micro_batch and not now.get("done"):
            now["done"] = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with_model(
        lambda built: built.model.get_submodule(
            _first_block(built.model) + ".mlp.act_fn"
        ).register_full_backward_pre_hook(check)
    )


def _first_block(model) -> str:
    return next(name for name, _ in model.named_modules() if name.endswith("layers.0"))


def long_step(step: int, seconds: float) -> None:
    """A step whose time is spent in one call of the library, which no Python code interrupts."""

    def act(now):
        if now == step:
            size = 1000
            matrix = torch.ones(size, size)
            began = torch.tensor(0.0)
            rate = _time(lambda: matrix @ matrix)
            side = int(size * (seconds / rate) ** (1 / 3))
            began += (torch.ones(side, side) @ torch.ones(side, side)).sum()

    at_step(act)


def _time(work) -> float:
    import time

    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def signal_before(moment: str, number: int) -> None:
    """A signal before there is a run to save."""
    if moment == "while data is read":
        from anyqlora.data import dataset

        prepare = dataset.load_data

        def interrupted(*arguments, **more):
            os.kill(os.getpid(), number)
            return prepare(*arguments, **more)

        dataset.load_data = interrupted
    else:
        os.kill(os.getpid(), number)


def say_to(path: str) -> None:
    """Standard output goes to `path`."""
    os.dup2(os.open(path, os.O_WRONLY), 1)


def poison_and_stop(where: str, steps: list[int], values: list[float], stop: int) -> None:
    poison(where, steps, values)
    signal_at(stop, signal.SIGTERM)


def run_out_and_stop(step: int, micro_batch: int, stop: int, number: int) -> None:
    run_out_backward(step, micro_batch)
    signal_at(stop, number)


def set_environment(values: dict) -> None:
    os.environ.update(values)


def poison_cache(place: str, content: bytes) -> None:
    """Something else where the hashes of files are remembered."""
    os.environ["XDG_CACHE_HOME"] = place
    os.makedirs(os.path.join(place, "anyqlora"))
    with open(os.path.join(place, "anyqlora", "hashes.json"), "wb") as file:
        file.write(content)


def crash_at_result() -> None:
    """End the process when all is done but result.json."""

    def act(number, name, paths, content, do):
        if paths[0].name.startswith("result.json"):
            os._exit(CRASHED)
        return do()

    each_call(act)
