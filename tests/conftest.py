"""Settings of all tests; its folder, which holds `oracle`, is on the path by being here."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("house", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("house")
