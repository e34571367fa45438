"""Settings of all tests; its folder, which holds `oracle` and `families`, is on the path by being here."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may depend on a network

import torch
from hypothesis import settings
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
settings.register_profile("house", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("house")
