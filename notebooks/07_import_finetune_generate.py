# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Import, fine-tune, generate, export
#
# A Hugging Face folder becomes a run, learns to answer questions with low-rank adapters on a sharded layout, answers
# them, and is exported as a Hugging Face folder again. The checkpoint is a small one, made here from files of this
# machine, so that no network is needed; with a real checkpoint, start at the import.

# %%
import json
import tempfile
from pathlib import Path

import jaxscale as js

js.simulate_devices(8)

import jax
import matplotlib.pyplot as plt
import numpy as np
import tokenizers

from jaxscale.convert.exporting import export_checkpoint
from jaxscale.convert.merge import merge
from jaxscale.convert.pretrained import import_checkpoint
from jaxscale.models import TransformerConfig
from jaxscale.step import LoRA
from jaxscale.train import FromRun

work = Path(tempfile.mkdtemp())
plt.rcParams["figure.dpi"] = 75

# %% [markdown]
# ## A checkpoint to begin with
#
# A tokenizer with the special tokens of ChatML, a small Llama trained on a few of Python's own files, and a chat
# template. `export_checkpoint` writes them as `transformers` would: safetensors, `config.json`,
# `tokenizer.json`.

# %%
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Cuba": "Havana", "Norway": "Oslo", "Ghana": "Accra", "Nepal": "Kathmandu", "Chile": "Santiago", "Qatar": "Doha",
}  # fmt: skip
QUESTION = "What is the capital of {}?"

source = str(Path(json.__file__).parent / "*.py")
bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=448,
    special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
texts = [*(p.read_text() for p in Path(json.__file__).parent.glob("*.py")), *[QUESTION, "user assistant"] * 50]
bpe.train_from_iterator(texts, trainer)
bpe.save(str(work / "tokenizer.json"))

pretrained = js.fit(
    model=TransformerConfig(vocab=448, depth=2, width=64, heads=4, kv_heads=2, hidden=128),
    tokenizer=js.data.HFTokenizer(str(work / "tokenizer.json")),
    data=js.data.text_files(source, heldout=0.0),
    layout=None, steps=30, batch_size=16, seq_len=64, lr=1e-2, eval_batches=0, run=work / "pretrained", quiet=True,
)  # fmt: skip
folder = export_checkpoint(pretrained, work / "hf")

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
about = json.loads((folder / "tokenizer_config.json").read_text())
(folder / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": TEMPLATE}))
end = bpe.token_to_id("<|im_end|>")
(folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
{p.name: p.stat().st_size for p in sorted(folder.iterdir())}

# %% [markdown]
# ## Import
#
# From here on it could be anybody's checkpoint. `import_checkpoint` (`jaxscale import HF_DIR RUN`) reads `config.json`,
# checks every name and shape, and writes a run folder, tensor by tensor. The other files are copied to its `hf/`.

# %%
base = import_checkpoint(folder, work / "base", say=lambda _: None)
print(base.info["family"], f"{base.config.model.param_count():,} parameters", base.config.tokenizer.special)


def ask(country):
    return [{"role": "user", "content": QUESTION.format(country)}]


base.chat(ask("France"), temperature=0.0, max_tokens=12).text

# %% [markdown]
# It knows nothing yet.
#
# ## Train on the answers of conversations
#
# A line of JSON is a conversation. The model's own template formats it, several are packed into a row, and the loss
# counts only what the assistant says, to the end of its turn: the white positions below. Rows depend only on the step,
# as always.

# %%
lines = [[*ask(c), {"role": "assistant", "content": f"{city}."}] for c, city in CAPITALS.items()]
(work / "capitals.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in lines))
corpus = js.data.chat_files(str(work / "capitals.jsonl"), heldout=0.0)
rows = corpus.source(base.tokenizer, seq_len=64, split="train", packing="fit")
batch = rows.rows(np.arange(4))

tokens, weights = batch["targets"][0], batch["weights"][0]
print("read:   ", repr(base.tokenizer.decode(tokens[:24])))
print("learned:", repr(base.tokenizer.decode(tokens[weights == 1])))
fig, ax = plt.subplots(figsize=(8, 1.4))
ax.imshow(batch["weights"], cmap="gray", aspect="auto", interpolation="nearest")
ax.set(xlabel="position", ylabel="row", title="weight of each target")
plt.show()

# %% [markdown]
# ## Adapters on a layout
#
# `train.start` names the run to start from, `train.adapters` the adapters to train. Each projection `x · W` gets
# `scale · (x · A) · B` with `A` and `B` of rank 16. They have the axis names of the weights they adapt, so any layout
# for the model shards them too. The model itself is frozen: it has no gradient and no optimizer state, and is not in
# the checkpoints.

# %%
tuned = js.fit(
    start=FromRun(str(base.path)),
    adapters=LoRA(rank=16, alpha=32.0),
    data=corpus, packing="fit", layout=js.Layout("fsdp=4,tensor=2"), steps=80, batch_size=8, seq_len=64, lr=1e-2,
    eval_batches=0, run=work / "tuned", quiet=True,
)  # fmt: skip
kernel = tuned.state.params["runs"][0]["blocks"][0]["attn"]["q"]["kernel"]
print("A", kernel["a"].shape, kernel["a"].sharding.spec)
print("B", kernel["b"].shape, kernel["b"].sharding.spec)
print("started from step", tuned.info["start"]["step"], "of", Path(tuned.info["start"]["run"]).name)
fig, ax = plt.subplots(figsize=(6, 2.4))
ax.plot([row["loss"] for row in tuned.metrics()])
ax.set(xlabel="step", ylabel="loss of the answers", yscale="log")
plt.show()

# %% [markdown]
# ## Ask again
#
# All questions at the same time, through the engine and its paged cache. A run with adapters is loaded with the
# adapters applied.

# %%
template = js.data.ChatTemplate.read(tuned.path / "hf")
prompts = [template.ids(ask(c), tuned.tokenizer).tolist() for c in CAPITALS]
completions = tuned.generate(prompts, temperature=0.0, max_tokens=12)
answers = {c: answer.text for c, answer in zip(CAPITALS, completions, strict=True)}
right = sum(answers[c] == f"{city}." for c, city in CAPITALS.items())
print(f"{right} of {len(CAPITALS)} right")
answers

# %% [markdown]
# ## Merge and export
#
# `merge` (`jaxscale merge RUN OUT`) adds the adapters to the weights: the result is an ordinary run, which needs
# neither the run it came from nor the adapters. `export_checkpoint` (`jaxscale export RUN HF_DIR`) writes it as a
# folder like the imported one, chat template included; imported again, it gives the same answers.

# %%
merged = merge(js.load(str(tuned.path)), work / "merged")
out = export_checkpoint(merged, work / "out")
again = import_checkpoint(out, work / "again", say=lambda _: None)
same = jax.tree.leaves(jax.tree.map(np.array_equal, merged.params(), again.params()))
print(all(same), sorted(p.name for p in out.iterdir()))
print(again.chat(ask("Peru"), temperature=0.0, max_tokens=12).text)
assert all(same) and right == len(CAPITALS)
