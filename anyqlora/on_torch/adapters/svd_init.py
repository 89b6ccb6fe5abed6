"""PiSSA and LoftQ: LoRA that starts from the singular vectors of each weight, taken as the weight streams by."""

from __future__ import annotations

import torch
from torch import nn

from anyqlora.core.errors import RunError
from anyqlora.models.lora_targets import PREFIX, as_plain_json
from anyqlora.on_torch.adapters.lora import Lora
from anyqlora.training.schedule import uniform_start

ITERATIONS = 16  # of the subspace: what PiSSA's authors take for a result that no longer differs from the exact one
SPARE = 8  # columns beyond the rank, which make the leading ones settle


def svd_factors(matrix: torch.Tensor, rank: int, name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B [out, rank] and A [rank, in], float32, whose product is nearly the best approximation of `matrix` [out, in] of
    that rank.

    Subspace iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4) from a start drawn by name: a full decomposition
    of one 4096 x 14336 weight takes minutes on a CPU. The signs of the singular vectors are fixed (largest entry of
    each row of A positive): libraries choose them freely.
    """
    matrix = matrix.float()
    columns = min(rank + SPARE, *matrix.shape)
    start = torch.from_numpy(uniform_start(name, (matrix.shape[1], columns), 1.0, seed)).to(matrix.device)
    q = torch.linalg.qr(matrix @ start).Q  # [out, columns]
    for _ in range(ITERATIONS):
        q = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ q).Q).Q
    u, s, vh = torch.linalg.svd(q.T @ matrix, full_matrices=False)
    u, s, vh = (q @ u)[:, :rank], s[:rank], vh[:rank]
    sign = torch.sign(vh.gather(1, vh.abs().argmax(1, keepdim=True)))
    root = s.sqrt()
    b, a = u * (root * sign.squeeze(1)), vh * (root.unsqueeze(1) * sign)
    missing = rank - len(s)  # of a layer narrower than the rank
    return nn.functional.pad(b, (0, missing)), nn.functional.pad(a, (0, 0, 0, missing))


class _SvdInitialized(Lora):
    def __init__(self, config, device):
        super().__init__(config, device)
        self.scale = config.lora_alpha / config.lora_rank
        self.starts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, name: str, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, a = svd_factors(matrix.float() / self.scale, self.config.lora_rank, name, self.config.seed)
        self.starts[name] = b, a
        return b, a

    def attach(self, model: nn.Module) -> nn.Module:
        model = super().attach(model)
        if self.starts:
            raise RunError(
                f"{len(self.starts)} weights were factored for an adapter that is not there, {min(self.starts)} is the "
                f"first"
            )
        self.initial = {name: p.detach().clone().cpu() for name, p in self.trainable(model).items() if not p.is_meta}
        return model

    def init_weights(self, name: str, module: nn.Module) -> None:
        b, a = self.starts.pop(name.removeprefix(PREFIX))
        module.lora_A["default"].weight.copy_(a)
        module.lora_B["default"].weight.copy_(b)


class Pissa(_SvdInitialized):
    """The frozen weight is W - scale B0 A0, with B0 A0 the leading singular part of W (Meng et al. 2024).

    The file must act on the original base, so it holds the difference: rank 2 r, [A; A0] and [B, -B0], alpha doubled.
    """

    def base_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name not in self.chosen:
            return weight
        b, a = self.keep(name, weight)
        return weight.float() - self.scale * (b @ a)

    def tensors(self, trainable: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = {}
        for name, value in trainable.items():
            first = self.initial[name].to(value.device)
            out[name] = torch.cat([value, first], 0) if ".lora_A." in name else torch.cat([value, -first], 1)
        return out

    def adapter_config(self) -> dict:
        config = super().adapter_config()
        return as_plain_json({**config, "r": 2 * config["r"], "lora_alpha": 2 * config["lora_alpha"]})


class Loftq(_SvdInitialized):
    """A and B start from what quantization lost, W - dequantize(quantize(W)) (Li et al. 2023, one iteration).

    The base stays the plain quantized one, so the adapter works on it wherever it is loaded.
    """

    observes = True

    def on_quantized(self, name: str, weight: torch.Tensor, held: torch.Tensor) -> None:
        if name in self.chosen:
            self.keep(name, weight.float() - held.float())
