"""The two forecasting backbones of examples/forecast.py, plain enough to copy.

Both take the look-back window and its time features and return the forecast, time in the middle, as in the papers'
code. They build their layers time-last, because every layer here acts on the time axis or on the model axis.

Shape suffixes: B windows in a batch, L look-back steps, T forecast steps, D variables, F time features,
N tokens (D variables + F time features), M model width, H attention heads, K width of one head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class ITransformer(nn.Module):
    """Attention across variables: each variable's whole look-back window is one token.

    Args:
        lookback, horizon: number of steps read and forecast, L and T.
        width: model width M, also the width of the feed-forward layers.
        num_heads, num_layers, dropout: as in any transformer encoder.

    Source: Liu et al., "iTransformer: Inverted Transformers Are Effective for Time Series Forecasting", ICLR 2024,
    with per-window normalisation after "Non-stationary Transformers", NeurIPS 2022.
    """

    def __init__(
        self,
        lookback: int,
        horizon: int,
        width: int = 128,
        num_heads: int = 8,
        num_layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(lookback, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(_EncoderLayer(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, horizon)

    def forward(self, x_BLD: Tensor, marks_BLF: Tensor) -> Tensor:
        """Forecast `(B, T, D)` from the window `(B, L, D)` and its time features `(B, L, F)`."""
        x_BDL = rearrange(x_BLD, "b l d -> b d l")
        # The level and scale of each window are taken out and put back, so that the encoder sees shapes only.
        mean_BD1 = x_BDL.mean(dim=-1, keepdim=True)
        std_BD1 = ((x_BDL - mean_BD1).square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
        tokens_BNL = torch.cat([(x_BDL - mean_BD1) / std_BD1, rearrange(marks_BLF, "b l f -> b f l")], dim=1)

        hidden_BNM = self.dropout(self.embed(tokens_BNL))
        for layer in self.layers:
            hidden_BNM = layer(hidden_BNM)
        hidden_BDM = self.norm(hidden_BNM[:, : x_BDL.shape[1]])  # forecasts come from the variables' tokens alone

        y_BDT = self.project(hidden_BDM) * std_BD1 + mean_BD1
        return rearrange(y_BDT, "b d t -> b t d")


class _EncoderLayer(nn.Module):
    """Self-attention over tokens, then a feed-forward layer, each followed by its normalisation (post-norm)."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BNM: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x_BNM), "b n (three h k) -> three b h n k", three=3, h=self.num_heads)
        # Written out: on CPU, at a dozen tokens, F.scaled_dot_product_attention with dropout is slower than this.
        weights_BHNN = self.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1))
        attended_BHNK = weights_BHNN @ v
        x_BNM = self.norm1(x_BNM + self.dropout(self.out(rearrange(attended_BHNK, "b h n k -> b n (h k)"))))
        fed_BNM = self.dropout(self.down(self.dropout(F.gelu(self.up(x_BNM)))))
        return self.norm2(x_BNM + fed_BNM)


class DLinear(nn.Module):
    """One linear map for the trend (a moving average), one for what is left, shared by all variables.

    Args:
        lookback, horizon: number of steps read and forecast, L and T.
        kernel: steps in the moving average, odd; the window's ends are padded with their own values.

    Source: Zeng et al., "Are Transformers Effective for Time Series Forecasting?", AAAI 2023.
    """

    def __init__(self, lookback: int, horizon: int, kernel: int = 25) -> None:
        super().__init__()
        self.kernel = kernel
        self.seasonal = nn.Linear(lookback, horizon)
        self.trend = nn.Linear(lookback, horizon)
        for linear in (self.seasonal, self.trend):
            nn.init.constant_(linear.weight, 1 / lookback)  # starts as the mean of the window

    def forward(self, x_BLD: Tensor, marks_BLF: Tensor) -> Tensor:
        """Forecast `(B, T, D)` from the window `(B, L, D)`; the time features `(B, L, F)` are not used."""
        x_BDL = rearrange(x_BLD, "b l d -> b d l")
        half = (self.kernel - 1) // 2
        trend_BDL = F.avg_pool1d(F.pad(x_BDL, (half, half), mode="replicate"), self.kernel, stride=1)
        y_BDT = self.seasonal(x_BDL - trend_BDL) + self.trend(trend_BDL)
        return rearrange(y_BDT, "b d t -> b t d")


BACKBONES: dict[str, type[nn.Module]] = {"itransformer": ITransformer, "dlinear": DLinear}
