"""Small decoders with random weights, in folders as transformers writes them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 8},
    "mistral": SMALL | {"sliding_window": 12},
    "gemma3_text": SMALL | {"head_dim": 8, "sliding_window": 12},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "phi3": SMALL | {"pad_token_id": 0},
}
WORDS = 199
END = 198
CHAT = "{% for each in messages %}{{ each.role }} {{ each.content }} {% endfor %}{% if add_generation_prompt %}w1 {% endif %}"


def made_model(kind: str) -> Any:
    """A decoder of this kind."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=WORDS, bos_token_id=197, eos_token_id=END, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config).eval()


def write_decoder(folder: Path, kind: str = "llama") -> Any:
    """Write a decoder, a tokenizer of the words w0 to w198, and a chat template. Returns the model."""
    model = made_model(kind)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT)
    return model


def expected_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What `generate` of transformers returns for a prompt, greedily, up to the token that ends a text."""
    found = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens[: tokens.index(END)] if END in tokens else tokens
