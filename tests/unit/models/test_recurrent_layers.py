"""Layers whose state follows the layout: the library's numbers on a sample, and no stand-in for another function."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tests.tiny_models import FOLLOWING, LEAKING, tiny_model

from taut.attention.layout import Layout
from taut.models import architecture, recurrent_layers
from taut.types import reach_of_samples

TOKENS = torch.arange(150) * 7 % 97
