"""Kimi-K2 (Moonshot AI 2025): DeepSeek-V3's architecture under another name."""

from __future__ import annotations

import dataclasses

from jaxscale.interop.families import deepseek_v3

FAMILY = dataclasses.replace(deepseek_v3.FAMILY, model_type="kimi_k2")
