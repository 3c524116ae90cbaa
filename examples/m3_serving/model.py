"""The forward pass of one step: every token of every request in the batch, as rows of one matrix.

T is the number of tokens of the step. Only attention looks across rows, and only attention knows of
requests; it goes through `msa_kernels`, which also writes the cache.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from msa_kernels import Batch, PagedCache, dense_attention, msa_attention

from .config import MSA_ATTENTION, ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight) over the last dimension, in float32, back in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first channels of each head.

    Args:
        x: [T, heads, D].
        cos: [T, 1, rotary_dim]; channel c turns with channel c + rotary_dim / 2.
        sin: the same.
    """
    turned, rest = x[..., : cos.size(-1)], x[..., cos.size(-1) :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


class Model:
    """MiniMax-M3's language model. Holds weights and no state: the cache is passed in."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        """Takes the tensors of `load_weights`; they decide dtype and device."""
        self.config = config
        self.weights = weights
        self.dtype = weights["embed_tokens.weight"].dtype
        self.device = weights["embed_tokens.weight"].device
        channels = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=self.device)
        self._inverse_frequency = 1.0 / config.rope_theta ** (channels / config.rotary_dim)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: Batch,
        caches: Sequence[PagedCache],
        logit_rows: Tensor,
        media_rows: Tensor | None = None,
        media_embeddings: Tensor | None = None,
    ) -> Tensor:
        """Computes one step and writes its keys and values to the caches.

        Args:
            tokens: [T] int64.
            positions: [T] int64, of each token in its request, cached prefix included.
            batch: the same T tokens as the operators see them.
            caches: one per layer, written in place.
            logit_rows: [N] int64, rows whose next token is wanted.
            media_rows: [M] int64, rows of placeholder tokens, or None.
            media_embeddings: [M, hidden], what stands in their embeddings' place.

        Returns:
            Logits [N, vocabulary] float32.
        """
        hidden = self.weights["embed_tokens.weight"][tokens]
        if media_rows is not None:
            hidden[media_rows] = media_embeddings.to(self.dtype)
        angles = positions.float()[:, None, None] * self._inverse_frequency
        angles = torch.cat((angles, angles), dim=-1)
        rotation = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        for layer in range(self.config.num_layers):
            at = f"layers.{layer}"
            normed = self._norm(hidden, f"{at}.input_layernorm")
            hidden = hidden + self._attention(normed, layer, rotation, caches[layer], batch)
            normed = self._norm(hidden, f"{at}.post_attention_layernorm")
            is_dense = self.config.mlp_layer_types[layer] == "dense"
            mlp = self._dense_mlp if is_dense else self._experts_mlp
            hidden = hidden + mlp(normed, f"{at}.mlp")
        return self._linear(self._norm(hidden[logit_rows], "norm"), "lm_head").float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _attention(
        self,
        x: Tensor,
        layer: int,
        rotation: tuple[Tensor, Tensor],
        cache: PagedCache,
        batch: Batch,
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]. An MSA layer's indexer scores with heads of its own."""
        config, at = self.config, f"layers.{layer}.self_attn"

        def heads(name: str, dim: int) -> Tensor:
            return self._linear(x, f"{at}.{name}_proj").view(x.size(0), -1, dim)

        def turned_heads(name: str, dim: int) -> Tensor:
            return rotate(self._norm(heads(name, dim), f"{at}.{name}_norm"), *rotation)

        q, k = turned_heads("q", config.head_dim), turned_heads("k", config.head_dim)
        v = heads("v", config.head_dim)
        if config.layer_types[layer] == MSA_ATTENTION:
            out = msa_attention(
                q,
                k,
                v,
                turned_heads("indexer.q", config.index_dim),
                turned_heads("indexer.k", config.index_dim).squeeze(1),
                cache,
                batch,
                topk=config.topk_blocks,
                init_blocks=config.init_blocks,
                local_blocks=config.local_blocks,
            )
        else:
            out = dense_attention(q, k, v, cache, batch)
        return self._linear(out.flatten(1), f"{at}.o_proj")

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        """[..., 2n] -> [..., n]: (up + 1) * gate * sigmoid(alpha * gate), both halves clamped."""
        limit = self.config.swiglu_limit
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1.0) * (gate * torch.sigmoid(gate * self.config.swiglu_alpha))

    def _dense_mlp(self, x: Tensor, at: str) -> Tensor:
        return self._linear(self._swiglu(self._linear(x, f"{at}.gate_up_proj")), f"{at}.down_proj")

    def _experts_mlp(self, x: Tensor, at: str) -> Tensor:
        """x [T, hidden] -> the routed experts' weighted sum plus the shared expert, [T, hidden]."""
        shares, experts = self._route(x, at)
        gate_up = self.weights[f"{at}.experts.gate_up_proj"]
        down = self.weights[f"{at}.experts.down_proj"]
        routed = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows, slots = torch.where(experts == expert)
            part = F.linear(self._swiglu(F.linear(x[rows], gate_up[expert])), down[expert])
            routed.index_add_(0, rows, (part * shares[rows, slots, None]).to(x.dtype))
        return routed * self.config.routed_scale + self._dense_mlp(x, f"{at}.shared_experts")

    def _route(self, x: Tensor, at: str) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (shares [T, k] float32, sum 1; experts [T, k] int64).

        The bias takes part in the choice only: it balances the experts' load and must not change
        their weight.
        """
        scores = torch.sigmoid(self._linear(x, f"{at}.gate").float())
        biased = scores + self.weights[f"{at}.gate.e_score_correction_bias"]
        experts = biased.topk(self.config.experts_per_token, dim=-1).indices
        shares = scores.gather(1, experts)
        return shares / shares.sum(-1, keepdim=True), experts
