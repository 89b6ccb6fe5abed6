"""The harness itself: ranks talk, answers come back in order, a failure is told and ends the others."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from anyqlora.testing import WorldFailed, world


def summed(number):
    dist.init_process_group("gloo")
    value = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(value)
    return int(os.environ["RANK"]), value.item()


def failing_on_one():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not want to")
    dist.barrier()


def test_ranks_talk_and_answer_in_order():
    assert world(3, summed, 10) == [(0, 33), (1, 33), (2, 33)]


def test_a_failure_is_told_and_ends_the_others():
    began = time.monotonic()
    with pytest.raises(WorldFailed, match="rank 1 does not want to"):
        world(2, failing_on_one)
    assert time.monotonic() - began < 20
