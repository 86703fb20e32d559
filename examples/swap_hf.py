"""Swap the MoE layers of two Hugging Face models for Tessera's, train, save, and load the result without Tessera.

    python examples/swap_hf.py

Two small models with random weights, a Qwen3-Next and a DeepSeek-V3, learn bytes of the standard library's sources on
the CPU. Needs the extra [hf]; takes less than half a minute.
"""

from __future__ import annotations

import sysconfig
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.utils import logging

from tessera_rt.integrations.hf import swap_moe

BATCH, LENGTH, STEPS = 4, 64, 20
COMMON = {"vocab_size": 256, "hidden_size": 128, "moe_intermediate_size": 64, "use_cache": False}


def qwen3_next() -> PreTrainedModel:
    """Gated delta nets and softmax attention 3 : 1, 32 experts with a sigmoid-gated shared one."""
    config = Qwen3NextConfig(
        **COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=32, num_experts_per_tok=4, shared_expert_intermediate_size=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def deepseek_v3() -> PreTrainedModel:
    """Latent attention, one dense layer, 32 experts in 4 groups with a shared one."""
    config = DeepseekV3Config(
        **COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, intermediate_size=256, first_k_dense_replace=1,
        n_routed_experts=32, num_experts_per_tok=4, n_group=4, topk_group=2,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def batches() -> list[Tensor]:
    """[BATCH, LENGTH] bytes each, cut from sources of the standard library."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - LENGTH, (STEPS, BATCH), generator=torch.Generator().manual_seed(0))
    return [torch.stack([data[start : start + LENGTH] for start in row]) for row in starts]


def loss_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def seconds(model: PreTrainedModel, tokens: Tensor) -> float:
    """CPU time of a forward and backward pass, the best of three."""
    found = []
    for _ in range(4):
        start = time.process_time()
        loss_of(model, tokens).backward()
        found.append(time.process_time() - start)
    model.zero_grad()
    return min(found[1:])


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    data = batches()
    for make in (qwen3_next, deepseek_v3):
        torch.manual_seed(0)
        model = make()
        before, time_before = loss_of(model, data[0]).item(), seconds(model, data[0])
        report = swap_moe(model)
        after, time_after = loss_of(model, data[0]).item(), seconds(model, data[0])
        print(f"{type(model).__name__}: {len(report.swapped)} blocks swapped, {len(report.kept)} kept")
        print(f"  loss before {before:.6f}, after {after:.6f}, difference {abs(after - before):.1e}")
        print(f"  CPU time of forward and backward: {time_before * 1e3:.0f} ms before, {time_after * 1e3:.0f} ms after")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for tokens in data:
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        trained = loss_of(model, data[0]).item()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder)
        reloaded = loss_of(loaded.eval(), data[0]).item()
        print(f"  after {STEPS} steps {trained:.6f}, saved and loaded without Tessera {reloaded:.6f}")
        if abs(after - before) > 1e-4 or abs(reloaded - trained) > 1e-4 or trained >= before:
            raise SystemExit("the losses should be equal, and training should lower them")


if __name__ == "__main__":
    main()
