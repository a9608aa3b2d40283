"""The undisturbed run: greedy `transformers.generate` in fp32, with the gap between the two best candidates."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch
from prompts import Prompt
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from components.model_cache import resolve_model

NEAR_TIE = 1e-3


class Expected(msgspec.Struct, frozen=True):
    """A prompt's greedy tokens, the text after each of them, and each choice's lead over the second best."""

    ids: tuple[int, ...]
    gaps: tuple[float, ...]
    texts: tuple[str, ...]  # texts[k]: of the first k tokens

    def differs(self, text: str) -> str | None:
        """None if `text` is right, or leaves the right road only at a near tie; else what is wrong."""
        if text == self.texts[-1]:
            return None
        agree = max(k for k, prefix in enumerate(self.texts) if text.startswith(prefix))
        gap = self.gaps[min(agree, len(self.gaps) - 1)]
        return None if gap < NEAR_TIE else f"after {agree} tokens (gap {gap:.4f}): {text!r}, not {self.texts[-1]!r}"


def greedy_reference(
    prompts: Iterable[Prompt], model_name: str = "smollm2-135m-instruct", *, device: str = "cpu"
) -> list[Expected]:
    """Runs each prompt alone; end-of-sequence tokens do not stop it."""
    torch.set_num_threads(1)  # more threads spin while they wait for each other, which starves the graphs under test
    folder = resolve_model(model_name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    found = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt.ids], device=device),
            attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.long, device=device),
            max_new_tokens=prompt.num_outputs,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = output.sequences[0, len(prompt.ids) :].tolist()
        best = [step[0].topk(2).values for step in output.logits]
        texts = tuple(tokenizer.decode(ids[:k], skip_special_tokens=True) for k in range(len(ids) + 1))
        found.append(Expected(tuple(ids), tuple(float(b[0] - b[1]) for b in best), texts))
    return found
