"""Ray Train over the same entry point: python examples/clusters/ray_train.py --workers 8 --model_name DIRECTORY
--dataset my.jsonl --strategy fsdp

Ray starts the workers and says who they are; each of them calls `train.train`, as train.py itself does. Needs `pip
install "ray[train]"`.
"""

import os
import sys


def worker(flags: dict) -> None:
    """One process of the run, inside a Ray worker that has formed torch's process group."""
    import ray.train

    from anyqlora.config.resolve import resolve
    from anyqlora.recipes.sft import train

    # Ray states them for torch in the same variables as torchrun; LOCAL_RANK is asked for, since older ones left it
    # out.
    os.environ.setdefault("LOCAL_RANK", str(ray.train.get_context().get_local_rank()))
    train(resolve(flags))


def main(argv: list[str]) -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    from anyqlora.config.resolve import canonical_argv

    flags = dict(word.removeprefix("--").split("=", 1) for word in canonical_argv(argv[2:]))
    TorchTrainer(
        worker, train_loop_config=flags, scaling_config=ScalingConfig(num_workers=int(argv[1]), use_gpu=True)
    ).fit()


if __name__ == "__main__":
    if sys.argv[1:2] != ["--workers"]:
        sys.exit("usage: ray_train.py --workers N [flags of train.py]")
    main(sys.argv[1:])
