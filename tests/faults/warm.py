"""What every trial needs, imported and looked up once, in the server that all of them are forked from. Nothing here runs autograd."""

import bitsandbytes  # noqa: F401
import peft  # noqa: F401
import torch
import transformers

import backend_manager  # noqa: F401
import train  # noqa: F401
from anyqlora import data, place, tokenizer, trackers, views  # noqa: F401
from anyqlora.layouts import DEMO_BASE

torch.set_num_threads(1)
transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE)  # builds tables of names and compiled patterns that are kept
tokenizer.load("demo")("warm")
