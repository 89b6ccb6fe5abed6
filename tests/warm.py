"""Imported once by the server that processes of tests are forked from, so that they start with what takes time. Nothing here runs autograd."""

import gc

import torch

import train  # noqa: F401
from anyqlora import data, place, tokenizer, trackers, views  # noqa: F401
from anyqlora.config import resolve
from anyqlora.on_torch.build import build
from anyqlora.on_torch.runtime import Runtime
from backend_manager import BackendManager

torch.set_num_threads(1)
plan = BackendManager("cpu").plan(resolve({"backend": "cpu", "precision": "fp32"}, environ={}, said="warm"))
build(plan.config, Runtime(plan))  # transformers makes tables of names and compiled patterns that are kept
data.prepare(plan.config, tokenizer.load("demo"))
gc.collect()
gc.freeze()  # else a collection in a child visits all of this, and copies each page it marks: 0.4 s
