from __future__ import annotations

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.kernels.regions import compile_regions
from shardwise.parallel.strategies.fsdp import regions_of_shards
from shardwise.tasks.segmentation.config import SegmentationModel
from shardwise.tasks.segmentation.network import Shapes, build_network, check_network, network_blocks, network_regions

SHAPES = Shapes(in_channels=2, out_channels=3, size=(32, 32, 32))


def model(name: str, **args: object) -> SegmentationModel:
    return SegmentationModel(name=name, args=dict(args))


@pytest.mark.parametrize(
    "options",
    [
        model("SegResNet"),
        model("UNet", channels=[4, 8], strides=[2]),
        model("AttentionUnet", channels=[4, 8], strides=[2]),
        model("BasicUNet", features=[4, 4, 8, 8, 8, 4]),
        model("UNETR", hidden_size=24, mlp_dim=48, num_heads=2, feature_size=4),
        model("DynUNet", kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2]),
        model("SegResNetDS", init_filters=8),
    ],
    ids=lambda options: options.name,
)
def test_a_network_of_monai_is_built_for_the_data(options: SegmentationModel) -> None:
    check_network(options, SHAPES)
    with torch.no_grad():
        assert build_network(options, SHAPES)(torch.zeros(1, 2, 32, 32, 32)).shape == (1, 3, 32, 32, 32)


def test_swin_unetr_is_built_and_its_stages_and_decoders_are_blocks() -> None:
    shapes = Shapes(1, 1, (64, 32, 32))
    options = model("SwinUNETR", feature_size=12, use_checkpoint=True)
    check_network(options, shapes)
    network = build_network(options, shapes)
    blocks = network_blocks(network)
    names = {module: name for name, module in network.named_modules()}
    assert {"swinViT.layers1.0", "swinViT.layers4.0", "encoder10", "decoder1", "out"} <= {
        names[block] for block in blocks
    }
    inside = [id(parameter) for block in blocks for parameter in block.parameters()]
    assert len(inside) == len(set(inside)), "no parameter is in two blocks"
    assert set(inside) == {id(parameter) for parameter in network.parameters()}


@pytest.mark.parametrize(
    "options",
    [model("SegResNet"), model("AttentionUnet", channels=[8, 16, 32], strides=[2, 2])],
    ids=lambda each: each.name,
)
def test_a_network_of_convolutions_is_compiled_as_a_whole(options: SegmentationModel) -> None:
    network = build_network(options, SHAPES)
    assert network_regions(network) == [network]


@pytest.mark.slow
def test_of_swin_unetr_convolutions_are_compiled_and_what_moves_windows_is_not() -> None:
    shapes = Shapes(1, 1, (64, 32, 32))
    network = build_network(model("SwinUNETR", feature_size=12), shapes)
    regions = network_regions(network)
    names = {module: name for name, module in network.named_modules()}
    kinds = [type(region).__name__ for region in regions]
    assert not any("Swin" in kind or "BasicLayer" in kind or "Attention" in kind for kind in kinds)
    assert {"encoder1.layer", "decoder1"} & {names[region] for region in regions}
    inside = [id(parameter) for region in regions for parameter in region.parameters()]
    assert len(inside) == len(set(inside)), "nothing is compiled twice"

    torch._dynamo.reset()
    image = torch.randn(1, 1, *shapes.size)
    plain = network(image)
    compiled = compile_regions(regions, backend="eager", one_size=True)
    assert torch.equal(network(image), plain)
    assert compiled.problem is None and compiled.seconds > 0


def test_sharded_no_compiled_part_has_a_block_in_it() -> None:
    swin = build_network(model("SwinUNETR", feature_size=12), Shapes(1, 1, (64, 32, 32)))
    regions = network_regions(swin)
    assert regions and regions_of_shards(regions, network_blocks(swin)) == regions, (
        "never its stages, which take minutes"
    )
    convolutions = build_network(model("SegResNet"), SHAPES)
    blocks = network_blocks(convolutions)
    assert regions_of_shards(network_regions(convolutions), blocks) == blocks


def test_what_is_given_goes_before_what_follows_from_the_data() -> None:
    network = build_network(model("SegResNet", out_channels=5), SHAPES)
    with torch.no_grad():
        assert network(torch.zeros(1, 2, 32, 32, 32)).shape[1] == 5


@pytest.mark.parametrize(
    ("options", "shapes", "message"),
    [
        (model("SegRessNet"), SHAPES, "model.name: MONAI has no network 'SegRessNet'. Nearest: SegResNet, "),
        (model("swinunetr"), SHAPES, "model.name: MONAI has no network 'swinunetr'. Nearest: SwinUNETR"),
        (model("zzz"), SHAPES, "Nearest: SegResNet, SwinUNETR, UNet, DynUNet"),
        (
            model("SegResNet", init_filter=8),
            SHAPES,
            "model.args: SegResNet takes no 'init_filter'. Nearest: init_filters. It takes spatial_dims, init_filters, in_ch",
        ),
        (model("SwinUNETR", img_size=[64, 64, 64]), SHAPES, "model.args: SwinUNETR takes no 'img_size'."),
        (model("UNet"), SHAPES, "model.args: UNet also needs channels, strides"),
        (model("SegResNet", init_filters=3), SHAPES, "model.args: SegResNet refuses these arguments: "),
        (
            model("SwinUNETR", feature_size=12),
            Shapes(1, 1, (96, 90, 60)),
            "data.size: SwinUNETR cannot take volumes of 96×90×60 voxels. Every side must be divisible by 32, for example "
            "[96, 96, 64].",
        ),
        (model("SwinUNETR", feature_size=12), Shapes(1, 1, (32, 32, 32)), "Use at least 64 in one direction."),
        (
            model("SegResNet"),
            Shapes(1, 1, (32, 36, 32)),
            "data.size: SegResNet cannot take volumes of 32×36×32 voxels. Every side must be divisible by 8,",
        ),
        (model("DenseNet121"), SHAPES, "model.name: DenseNet121 gives a tensor of (3,) where (3, 32, 32, 32) is needed"),
        (model("SegResNetVAE", input_image_size=[32, 32, 32]), SHAPES, "model.name: SegResNetVAE gives a tuple where"),
        (model("SegResNet", out_channels=5), SHAPES, "gives a tensor of (5, 32, 32, 32) where (3, 32, 32, 32)"),
    ],
)  # fmt: skip
def test_a_network_that_cannot_be_used_says_why(options: SegmentationModel, shapes: Shapes, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_network(options, shapes)
    assert message in str(caught.value)
