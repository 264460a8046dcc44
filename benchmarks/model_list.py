"""The models of :mod:`benchmarks.models`: each is built with random weights and called with its batch it gives a loss.

Vision models are timm's and language models are transformers', in configurations small enough for two cores; the others
are written here.  Dropout is 0: what draws random numbers is torch's own in every backend but inductor.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, IMAGE, LENGTH, CLASSES, WORDS = 2, 64, 32, 10, 128

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Model:
    """One model of the table.

    :param name: of the row.
    :param source: where its code is from: ``"timm"``, ``"transformers"`` or ``"here"``.
    :param build: gives the module and its batch; ``module(*batch)`` is the loss.
    """

    name: str
    source: str
    build: Callable[[], tuple[nn.Module, Batch]]


# -- timm --------------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A network of images with the loss of its classes."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), labels)


class _Absent:
    """What timm asks of torchvision when it is imported, and never calls for these models."""


def _import_timm() -> Any:
    """timm, without torchvision where there is none: its models read the data package's constants and the name of one
    class.
    """
    if "timm" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        found = importlib.util.find_spec("timm")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("timm is not installed: pip install --no-deps timm")
        path = Path(found.origin).parent / "data" / "constants.py"
        spec = importlib.util.spec_from_file_location("timm.data", path)
        assert spec is not None and spec.loader is not None
        sys.modules["timm.data"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name in ("torchvision", "torchvision.ops", "torchvision.ops.misc"):
            sys.modules[name] = module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.FrozenBatchNorm2d = _Absent  # type: ignore[attr-defined]
    import timm

    return timm


def _images(name: str, arch: str, size: int = IMAGE, **options: Any) -> Model:
    def build() -> tuple[nn.Module, Batch]:
        timm = _import_timm()
        if arch[0].isupper():  # a class, where the functions that build it leave a size fixed
            net = getattr(timm.models, arch)(num_classes=CLASSES, **options)
        else:
            net = timm.create_model(arch, num_classes=CLASSES, **options)
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return Classifier(net), (torch.randn(BATCH, 3, size, size), torch.randint(0, CLASSES, (BATCH,)))

    return Model(name, "timm", build)


_TIMM = [
    _images("resnet18", "resnet18"),
    _images("resnet50", "resnet50"),
    _images("mobilenet_v3", "mobilenetv3_small_100"),
    _images("efficientnet_b0", "efficientnet_b0"),
    _images("densenet121", "densenet121", block_config=(3, 6, 6, 4)),
    _images("regnet", "regnety_002"),
    _images("convnext_tiny", "convnext_tiny", depths=(1, 1, 2, 1), dims=(24, 48, 96, 192)),
    _images("vit_b_16", "vit_base_patch16_224", img_size=IMAGE, embed_dim=96, depth=3, num_heads=4),
    _images(
        "swin_t",
        "swin_tiny_patch4_window7_224",
        img_size=IMAGE,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
    ),
    _images("mixer", "MlpMixer", img_size=IMAGE, patch_size=16, embed_dim=96, num_blocks=3),
    _images("levit", "Levit", img_size=IMAGE, embed_dim=(64, 96), key_dim=16, depth=(2, 2), num_heads=(4, 6)),
    _images("maxvit", "maxvit_rmlp_pico_rw_256", img_size=IMAGE, embed_dim=(32, 64), depths=(1, 1)),
    _images("nfnet", "nfnet_l0"),
    _images("beit", "beit_base_patch16_224", img_size=IMAGE, embed_dim=96, depth=3, num_heads=4),
    _images("deit", "deit_tiny_patch16_224", img_size=IMAGE, depth=3),
    _images("resmlp", "resmlp_12_224", img_size=IMAGE),
    _images("mobilevit", "mobilevit_xxs"),
]

# -- transformers ------------------------------------------------------------------------------------------------------


class Labelled(nn.Module):
    """A network of transformers, called by keywords; the loss is its own, or the mean square of what it gives."""

    def __init__(self, net: nn.Module, keywords: tuple[str, ...], fixed: dict[str, Any]):
        super().__init__()
        self.net, self.keywords, self.fixed = net, keywords, fixed

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.net(**dict(zip(self.keywords, batch, strict=True)), **self.fixed).loss


_SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def _tokens() -> torch.Tensor:
    return torch.randint(3, WORDS, (BATCH, LENGTH))


def _language(name: str, config: str, net: str, inputs: dict[str, Callable[[], torch.Tensor]], **sizes: Any) -> Model:
    """A class of transformers with a configuration of these sizes and every dropout 0."""

    def build() -> tuple[nn.Module, Batch]:
        import transformers

        made = getattr(transformers, config)(**sizes)
        _without_dropout(made)
        fixed = {"return_loss": True} if "Clip" in net or "CLIP" in net else {}
        if hasattr(made, "use_cache"):
            fixed["use_cache"] = False
        return Labelled(getattr(transformers, net)(made), tuple(inputs), fixed), tuple(f() for f in inputs.values())

    return Model(name, "transformers", build)


def _without_dropout(config: Any) -> None:
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _without_dropout(value)
        elif isinstance(value, float) and any(word in key for word in ("drop", "pdrop")):
            setattr(config, key, 0.0)


_CAUSAL: dict[str, Callable[[], torch.Tensor]] = {"input_ids": _tokens, "labels": _tokens}
_CLASSIFIED: dict[str, Callable[[], torch.Tensor]] = {
    "input_ids": _tokens,
    "attention_mask": lambda: (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 5]])).long(),
    "labels": lambda: torch.randint(0, 2, (BATCH,)),
}
_PICTURES: dict[str, Callable[[], torch.Tensor]] = {
    "pixel_values": lambda: torch.randn(BATCH, 3, IMAGE, IMAGE),
    "labels": lambda: torch.randint(0, 2, (BATCH,)),
}
_T5 = {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_TEXT_AND_IMAGE = {
    "text_config": {**_SMALL, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
    "vision_config": {**_SMALL, "image_size": IMAGE, "patch_size": 16},
    "projection_dim": 32,
}
_ENCODER_DECODER = {
    "vocab_size": WORDS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_WHISPER = {
    **{name: value for name, value in _ENCODER_DECODER.items() if name != "max_position_embeddings"},
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 64,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_MIXTURE = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}

_TRANSFORMERS = [
    _language("bert", "BertConfig", "BertForSequenceClassification", _CLASSIFIED, **_SMALL),
    _language("distilbert", "DistilBertConfig", "DistilBertForSequenceClassification", _CLASSIFIED, vocab_size=WORDS,
              dim=64, hidden_dim=128, n_layers=2, n_heads=4, max_position_embeddings=64),
    _language("roberta", "RobertaConfig", "RobertaForSequenceClassification", _CLASSIFIED,
              **{**_SMALL, "pad_token_id": 0}),
    _language("electra", "ElectraConfig", "ElectraForSequenceClassification", _CLASSIFIED, **_SMALL,
              embedding_size=32),
    _language("gpt2", "GPT2Config", "GPT2LMHeadModel", _CAUSAL, vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4,
              n_positions=64, loss_type="ForCausalLM"),
    _language("llama", "LlamaConfig", "LlamaForCausalLM", _CAUSAL, **_SMALL, num_key_value_heads=2),
    _language("qwen3", "Qwen3Config", "Qwen3ForCausalLM", _CAUSAL, **_SMALL, num_key_value_heads=2, head_dim=16),
    _language("mixtral", "MixtralConfig", "MixtralForCausalLM", _CAUSAL, **_SMALL, **_MIXTURE),
    _language("gemma", "GemmaConfig", "GemmaForCausalLM", _CAUSAL, **_SMALL, num_key_value_heads=2, head_dim=16),
    _language("phi", "PhiConfig", "PhiForCausalLM", _CAUSAL, **_SMALL),
    _language("opt", "OPTConfig", "OPTForCausalLM", _CAUSAL, vocab_size=WORDS, hidden_size=64, ffn_dim=128,
              num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64),
    _language("bloom", "BloomConfig", "BloomForCausalLM", _CAUSAL, vocab_size=WORDS, hidden_size=64, n_layer=2,
              n_head=4),
    _language("falcon", "FalconConfig", "FalconForCausalLM", _CAUSAL, vocab_size=WORDS, hidden_size=64,
              num_hidden_layers=2, num_attention_heads=4, multi_query=True),
    _language("t5", "T5Config", "T5ForConditionalGeneration", _CAUSAL, **_T5, decoder_start_token_id=0,
              pad_token_id=0),
    _language("mamba", "MambaConfig", "MambaForCausalLM", _CAUSAL, vocab_size=WORDS, hidden_size=64, state_size=8,
              num_hidden_layers=2),
    _language("vit", "ViTConfig", "ViTForImageClassification", _PICTURES, hidden_size=64, intermediate_size=128,
              num_hidden_layers=2, num_attention_heads=4, image_size=IMAGE, patch_size=16),
    _language("albert", "AlbertConfig", "AlbertForSequenceClassification", _CLASSIFIED, **_SMALL, embedding_size=32),
    _language("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", _CAUSAL, **_SMALL),
    _language("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", _CAUSAL, **_SMALL, num_key_value_heads=2,
              head_dim=16, sliding_window=8),
    _language("bart", "BartConfig", "BartForConditionalGeneration", _CAUSAL, **_ENCODER_DECODER),
    _language("clip", "CLIPConfig", "CLIPModel",
              {"input_ids": _tokens, "pixel_values": _PICTURES["pixel_values"]}, **_TEXT_AND_IMAGE),
    _language("whisper", "WhisperConfig", "WhisperForConditionalGeneration",
              {"input_features": lambda: torch.randn(BATCH, 16, 64), "labels": _tokens}, **_WHISPER),
]  # fmt: skip

# -- written here ------------------------------------------------------------------------------------------------------


def _layers(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLUs between them."""
    layers = [layer for inner, outer in pairwise(sizes) for layer in (nn.Linear(inner, outer), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Dense and categorical features, pairwise products, a click's probability.

    :param bottom: sizes between the dense features and ``width``.  :param top: between the products and the click.
    """

    def __init__(
        self,
        width: int = 16,
        tables: int = 8,
        rows: int = 500,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64,),
    ):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom, pairs = _layers(13, *bottom, width).append(nn.ReLU()), (tables + 1) * tables // 2
        self.top = _layers(width + pairs, *top, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: torch.Tensor, bags: torch.Tensor, clicks: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(bags[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (features @ features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], 1)).squeeze(1), clicks)

    @staticmethod
    def batch() -> Batch:
        return torch.randn(16, 13), torch.randint(0, 500, (16, 8, 4)), torch.randint(0, 2, (16,)).float()


class STN(nn.Module):
    """A spatial transformer: a small network turns the image before another reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(1, 8, 7), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 10, 5), nn.MaxPool2d(2), nn.ReLU()
        )
        self.turn = nn.Sequential(nn.Linear(10 * 3 * 3, 32), nn.ReLU(), nn.Linear(32, 6))
        self.read = nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(1440, 10))
        with torch.no_grad():
            self.turn[2].bias.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        theta = self.turn(self.locate(x).flatten(1)).view(-1, 2, 3)
        turned = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        return F.nll_loss(F.log_softmax(self.read(turned), 1), labels)

    @staticmethod
    def batch() -> Batch:
        return torch.randn(4, 1, 28, 28), torch.randint(0, 10, (4,))


def _double(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
        nn.Conv2d(outer, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, with what was seen on the way down beside it; dropout in the
    middle.
    """

    def __init__(self, width: int = 8, levels: int = 2, dropout: float = 0.0):
        super().__init__()
        sizes = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(_double(inner, outer) for inner, outer in pairwise([3, *sizes[:-1]]))
        self.middle, self.drop = _double(sizes[-2], sizes[-1]), nn.Dropout(dropout)
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in reversed(sizes[:-1]))
        self.up = nn.ModuleList(_double(2 * n, n) for n in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = []
        for block in self.down:
            seen.append(block(x))
            x = F.max_pool2d(seen[-1], 2)
        x = self.drop(self.middle(x))
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([seen.pop(), rise(x)], 1))
        return F.cross_entropy(self.head(x), labels)

    @staticmethod
    def batch() -> Batch:
        return torch.randn(BATCH, 3, 32, 32), torch.randint(0, 2, (BATCH, 32, 32))


class VAE(nn.Module):
    """A variational autoencoder; its noise is an input."""

    def __init__(self, latent: int = 16):
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid())

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encode(x).chunk(2, 1)
        found = self.decode(mean + noise * torch.exp(0.5 * log_variance))
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy(found, x.flatten(1), reduction="sum") + divergence

    @staticmethod
    def batch() -> Batch:
        return torch.rand(8, 1, 28, 28), torch.randn(8, 16)


class LSTM(nn.Module):
    """A recurrent language model, its cell written out."""

    def __init__(self, width: int = 48):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.inner, self.again = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.words(tokens))
        h = c = torch.zeros_like(x[:, 0, : x.shape[-1] // 4])
        rows = []
        for t in range(tokens.shape[1]):
            i, f, g, o = (x[:, t] + self.again(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            rows.append(h)
        return F.cross_entropy(self.head(torch.stack(rows, 1)).flatten(0, 1), targets.flatten())

    @staticmethod
    def batch() -> Batch:
        return _tokens()[:, :16], _tokens()[:, :16]


class GCN(nn.Module):
    """Messages along edges, added up per node, divided by degrees."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.first, self.second = nn.Linear(24, width), nn.Linear(width, 7)

    def spread(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        degree = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, edges[1], torch.ones_like(x[edges[0], 0]))
        messages = x[edges[0]] / degree.clamp(min=1).sqrt()[edges[1]].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, edges[1], messages)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.spread(self.first(x), edges))
        return F.cross_entropy(self.spread(self.second(x), edges), labels)

    @staticmethod
    def batch() -> Batch:
        return torch.randn(200, 24), torch.randint(0, 200, (2, 900)), torch.randint(0, 7, (200,))


class DeepLab(nn.Module):
    """Dilated convolutions beside each other and the mean of all, brought up to the image's size."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = _double(width, width)
        self.branches = nn.ModuleList(
            [nn.Conv2d(width, width, 1), *(nn.Conv2d(width, width, 3, padding=d, dilation=d) for d in (2, 4, 6))]
        )
        self.whole = nn.Conv2d(width, width, 1)
        self.project = nn.Sequential(nn.Conv2d(5 * width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        size = x.shape[-2:]
        x = self.body(self.stem(x))
        mean = F.interpolate(self.whole(F.adaptive_avg_pool2d(x, 1)), size=x.shape[-2:], mode="bilinear")
        x = self.project(torch.cat([*(F.relu(branch(x)) for branch in self.branches), F.relu(mean)], 1))
        return F.cross_entropy(F.interpolate(self.head(x), size=size, mode="bilinear"), labels)

    @staticmethod
    def batch() -> Batch:
        return torch.randn(BATCH, 3, 32, 32), torch.randint(0, 5, (BATCH, 32, 32))


class FCN(nn.Module):
    """A fully convolutional network: scores of two depths added up, brought up by transposed convolutions."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.first, self.second = _double(3, width), _double(width, 2 * width)
        self.near, self.far = nn.Conv2d(width, 5, 1), nn.Conv2d(2 * width, 5, 1)
        self.rise = nn.ConvTranspose2d(5, 5, 4, stride=2, padding=1, bias=False)
        self.last = nn.ConvTranspose2d(5, 5, 4, stride=2, padding=1, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        near = F.max_pool2d(self.first(x), 2)
        far = F.avg_pool2d(self.second(near), 2)
        return F.cross_entropy(self.last(self.near(near) + self.rise(self.far(far))), labels)

    @staticmethod
    def batch() -> Batch:
        return torch.randn(BATCH, 3, 32, 32), torch.randint(0, 5, (BATCH, 32, 32))


class GAT(nn.Module):
    """Attention over a dense graph's neighbours."""

    def __init__(self, width: int = 16, heads: int = 4):
        super().__init__()
        self.project, self.head = nn.Linear(24, heads * width), nn.Linear(heads * width, 7)
        self.source, self.target = (nn.Parameter(torch.randn(heads, width) * 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.project(x).view(x.shape[0], *self.source.shape).transpose(0, 1)
        scores = torch.einsum("hnd,hd->hn", h, self.source)[:, :, None] + (h * self.target[:, None]).sum(-1)[:, None]
        weights = F.leaky_relu(scores, 0.2).masked_fill(edges == 0, float("-inf")).softmax(-1)
        return F.cross_entropy(self.head(F.elu(weights @ h).transpose(0, 1).flatten(1)), labels)

    @staticmethod
    def batch() -> Batch:
        edges = (torch.rand(40, 40) < 0.2).long() | torch.eye(40, dtype=torch.long)
        return torch.randn(40, 24), edges, torch.randint(0, 7, (40,))


class NeRF(nn.Module):
    """Positions as sines, a deep network with a skip, densities composed along rays."""

    def __init__(self, width: int = 64, octaves: int = 6):
        super().__init__()
        self.octaves, wide = octaves, 3 * 2 * octaves
        self.first = nn.Sequential(nn.Linear(wide, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(width + wide, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, places: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
        turns = places[..., None] * 2.0 ** torch.arange(self.octaves)
        x = torch.cat([turns.sin(), turns.cos()], -1).flatten(-2)
        found = self.second(torch.cat([self.first(x), x], -1))
        density = F.softplus(found[..., 3])
        weights = density / (density.sum(1, keepdim=True) + 1.0)
        return F.mse_loss((weights[..., None] * found[..., :3].sigmoid()).sum(1), colours)

    @staticmethod
    def batch() -> Batch:
        return torch.rand(32, 16, 3), torch.rand(32, 3)


class TCN(nn.Module):
    """Dilated causal convolutions over time with weight normalisation and residuals."""

    def __init__(self, width: int = 32):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(norm(nn.Conv1d(width, width, 3, dilation=d)) for d in (1, 2, 4))
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens).transpose(1, 2)
        for layer in self.layers:
            x = x + F.gelu(layer(F.pad(x, (2 * layer.dilation[0], 0))))
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), targets.flatten())

    @staticmethod
    def batch() -> Batch:
        return _tokens(), _tokens()


class Recurrent(nn.Module):
    """A language model of torch's own recurrent layers, two of them in both directions."""

    def __init__(self, kind: Any, width: int = 32):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(2 * width, WORDS)
        self.layers = kind(width, width, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(self.words(tokens))[0]).flatten(0, 1), targets.flatten())

    batch = LSTM.batch


class MiniLM(nn.Module):
    """Sentences as mean states of an encoder, paired by their cosines: a sentence belongs to the one at its index.

    :param dropout: of the encoder.
    """

    def __init__(self, width: int = 48, dropout: float = 0.0):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width, padding_idx=0), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def sentences(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == 0
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)
        return F.normalize(x.sum(1) / (~padding).sum(1, keepdim=True), dim=1)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        scores = self.sentences(first) @ self.sentences(second).T * 20.0
        return F.cross_entropy(scores, torch.arange(first.shape[0]))

    @staticmethod
    def batch() -> Batch:
        kept = torch.arange(16) < torch.tensor([16, 12, 9, 16])[:, None]
        return torch.randint(1, WORDS, (4, 16)) * kept, torch.randint(1, WORDS, (4, 16)) * kept.flip(0)


class Style(nn.Module):
    """An image turned into another: reflected borders, instance norms, residuals, nearest neighbours on the way up."""

    def __init__(self, width: int = 8):
        super().__init__()
        wide = 2 * width
        self.down = nn.Sequential(
            nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width, affine=True), nn.ReLU(),
            nn.Conv2d(width, wide, 3, 2, 1), nn.InstanceNorm2d(wide, affine=True), nn.ReLU(),
        )  # fmt: skip
        self.body = nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1), nn.GroupNorm(4, wide), nn.LeakyReLU(0.2))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(wide, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        return F.smooth_l1_loss(torch.tanh(self.up(x + self.body(x))), wanted)

    @staticmethod
    def batch() -> Batch:
        return torch.randn(BATCH, 3, 32, 32), torch.rand(BATCH, 3, 32, 32)


class FastText(nn.Module):
    """Means of bags of n-grams, some of them padding, one linear layer."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.grams = nn.EmbeddingBag(1000, width, mode="mean", padding_idx=0)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, grams: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.grams(grams)), labels, label_smoothing=0.1)

    @staticmethod
    def batch() -> Batch:
        return torch.randint(0, 1000, (16, 20)) * (torch.rand(16, 20) < 0.8), torch.randint(0, CLASSES, (16,))


class LearnedScales(nn.Module):
    """Two layers whose weights and activations are quantized by scales that learn."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.first, self.second = nn.Linear(24, width), nn.Linear(width, CLASSES)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor([s])) for s in (0.003, 0.003, 0.05, 0.03))

    def quantized(self, x: torch.Tensor, scale: int) -> torch.Tensor:
        steps = (x / self.scales[scale]).clamp(-128, 127)
        return (steps + (steps.round() - steps).detach()) * self.scales[scale]  # learned step sizes: round passes g on

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.quantized(x, 2), self.quantized(self.first.weight, 0), self.first.bias)
        x = F.linear(self.quantized(F.relu(x), 3), self.quantized(self.second.weight, 1), self.second.bias)
        return F.cross_entropy(x, labels)

    @staticmethod
    def batch() -> Batch:
        return torch.randn(16, 24), torch.randint(0, CLASSES, (16,))


def _written(name: str, kind: Any) -> Model:
    return Model(name, "here", lambda: (kind(), kind.batch()))


def _recurrent(name: str, kind: Any) -> Model:
    return Model(name, "here", lambda: (Recurrent(kind), Recurrent.batch()))


_HERE = [
    _written("dlrm", DLRM),
    _written("stn", STN),
    _written("unet", UNet),
    _written("vae", VAE),
    _written("lstm", LSTM),
    _written("gcn", GCN),
    _written("gat", GAT),
    _written("deeplab", DeepLab),
    _written("fcn", FCN),
    _written("nerf", NeRF),
    _written("tcn", TCN),
    _recurrent("lstm_layers", nn.LSTM),
    _recurrent("gru_layers", nn.GRU),
    _written("minilm", MiniLM),
    _written("style", Style),
    _written("fasttext", FastText),
    _written("learned_scales", LearnedScales),
]

MODELS: dict[str, Model] = {model.name: model for model in (*_TIMM, *_TRANSFORMERS, *_HERE)}


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floats of one dtype."""
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)
