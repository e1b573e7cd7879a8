"""Models of timm with few layers, made when they are needed: its import takes two seconds."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.models.libraries import import_timm
from tests.models.registry import images, register

IMAGES = ((4, 32), (3, 48))


def small(name: str, **settings: Any) -> nn.Module:
    """A model of timm for ten classes, without random layers."""
    return import_timm().create_model(name, num_classes=10, **settings)


@register(images, IMAGES, separable=False)
def timm_resnet() -> nn.Module:
    """`resnet10t`, BatchNorm."""
    return small("resnet10t", channels=(8, 16, 24, 32), stem_width=8)


@register(images, IMAGES)
def timm_vit() -> nn.Module:
    """`vit_tiny`, images of any size."""
    return small(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=4,
        num_heads=2,
        dynamic_img_size=True,
    )


@register(images, IMAGES)
def timm_swin() -> nn.Module:
    """`swin_tiny`, shifted windows."""
    return small(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        patch_size=2,
        window_size=4,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
        strict_img_size=False,
    )


@register(images, IMAGES)
def timm_convnext() -> nn.Module:
    """`convnext_atto`."""
    return small("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 12, 16))


@register(images, IMAGES, separable=False)
def timm_efficientnet() -> nn.Module:
    """`test_efficientnet`, BatchNorm."""
    return small("test_efficientnet")
