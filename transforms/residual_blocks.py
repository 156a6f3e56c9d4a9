"""torchvision's residual blocks with a branch that can be dropped. Imports torchvision, which takes seconds.

Shapes: B batch, C channels, H and W height and width, N tokens, D features.
"""

from __future__ import annotations

import torch
import torchvision
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vision_transformer import EncoderBlock


class DropBranch(torchvision.ops.StochasticDepth):  # type: ignore[misc]
    """torchvision's module, under a name that says that the surgery set it."""


class StochasticBasicBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's, with the branch dropped at random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) to the same number of dimensions."""
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.drop_branch(self.bn2(self.conv2(branch)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(branch + shortcut)  # type: ignore[no-any-return]


class StochasticBottleneck(Bottleneck):  # type: ignore[misc]
    """torchvision's, with the branch dropped at random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) to the same number of dimensions."""
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.relu(self.bn2(self.conv2(branch)))
        branch = self.drop_branch(self.bn3(self.conv3(branch)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(branch + shortcut)  # type: ignore[no-any-return]


class StochasticEncoderBlock(EncoderBlock):  # type: ignore[misc]
    """torchvision's, with each of the two branches dropped at random."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(B, N, D) to the same."""
        branch = self.ln_1(input)
        branch, _ = self.self_attention(branch, branch, branch, need_weights=False)
        x = self.drop_branch(self.dropout(branch)) + input
        return self.drop_branch(self.mlp(self.ln_2(x))) + x  # type: ignore[no-any-return]


__all__ = ["DropBranch", "StochasticBasicBlock", "StochasticBottleneck", "StochasticEncoderBlock"]
