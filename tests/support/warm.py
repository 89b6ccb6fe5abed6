"""Imported once by the server that processes of tests are forked from, so that they start with what takes time.

Nothing here runs autograd.
"""

import gc

import torch

from anyqlora.config.resolve import resolve
from anyqlora.data import dataset, tokenizer
from anyqlora.on_torch.assembly.build import build
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning.backends import BackendManager
from anyqlora.recipes import sft  # noqa: F401
from anyqlora.reporting import select, trackers  # noqa: F401

torch.set_num_threads(1)
plan = BackendManager("cpu").plan(resolve({"backend": "cpu", "precision": "fp32"}, environ={}, origin="warm"))
build(plan.config, Runtime(plan))  # transformers makes tables of names and compiled patterns that are kept
dataset.load_data(plan.config, tokenizer.load_tokenizer("demo"))
gc.collect()
gc.freeze()  # else a collection in a child visits all of this, and copies each page it marks: 0.4 s
