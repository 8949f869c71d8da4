"""A decoder-only language model: embedding, pre-norm blocks, final norm and head, each a layer (L = layers + 3)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chunktune.models.base import LayerBuilder, ModelDefinition
from chunktune.spec import TransformerModel


class Embedding(nn.Module):
    """(b, sequence) token ids to (b, sequence, hidden): token plus learned position."""

    def __init__(self, vocab: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Parameter(torch.empty(sequence, hidden))
        # The default spread of 1 starts far from ln(vocab), the loss of a model that knows nothing.
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up and add."""
        embedded: Tensor = self.token(tokens) + self.position[: tokens.shape[1]]
        return embedded


class Block(nn.Module):
    """Causal attention and a four times wider MLP, each after a norm and beside a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(b, sequence, hidden) to the same."""
        x = x + self._attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result

    def _attention(self, x: Tensor) -> Tensor:
        samples, sequence, hidden = x.shape
        split = self.query_key_value(x).view(samples, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(samples, sequence, hidden))
        return out


def _layers(spec: TransformerModel) -> list[LayerBuilder]:
    return [
        partial(Embedding, spec.vocab, spec.sequence, spec.hidden),
        *[partial(Block, spec.hidden, spec.heads)] * spec.layers,
        partial(nn.LayerNorm, spec.hidden),
        partial(nn.Linear, spec.hidden, spec.vocab, bias=False),
    ]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in float32 whatever the logits are."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(spec: TransformerModel) -> ModelDefinition:
    """The language model of a spec, on random tokens."""

    def sample_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(spec.vocab, (samples, spec.sequence + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return ModelDefinition(tuple(_layers(spec)), sample_batch, next_token_loss, spec.sequence)
