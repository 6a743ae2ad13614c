"""Our engine compared with `generate` of `transformers`: same weights, same prompts, one process.

    python experiments/benchmarks/generate.py            a 9M-parameter Llama, a few minutes on two cores

Greedy tokens have to be the same before anything is timed. Every round has new prompts, so that the prefix cache has no
pages for them. Results are in `results/generate.json`; `README.md` explains them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np

TARGET = 1.5  # our tokens a second over theirs, at batch 8
ROUNDS = 9
PAGE = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama."""

    layers: int = 6
    width: int = 320
    heads: int = 10
    kv_heads: int = 5
    hidden: int = 864
    vocab: int = 4096
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences that are generated at the same time: (prompt length, new tokens) of each."""

    name: str
    sequences: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Return the length of the longest sequence."""
        return max(prompt + new for prompt, new in self.sequences)

    @property
    def new(self) -> int:
        """Return the new tokens of all sequences."""
        return sum(new for _, new in self.sequences)

    def prompts(self, n: int, vocab: int) -> list[tuple[int, ...]]:
        """Return the random prompts of round `n`."""
        random = np.random.default_rng(n)
        return [tuple(random.integers(3, vocab, prompt).tolist()) for prompt, _ in self.sequences]


CASES = {
    "one": Case("batch 1", ((128, 128),)),
    "eight": Case("batch 8", ((128, 128),) * 8),
    "unlike": Case("8 of unlike lengths", tuple((16 * i, 144 - 16 * i) for i in range(1, 9))),
}


class Ours:
    """Our engine; it has no end id, so that every sequence gets all its tokens."""

    def __init__(self, graphdef: Any, params: Any, case: Case, z: Sizes):
        from jaxscale.infer.cache import Paged
        from jaxscale.infer.engine import Cached, Engine

        self.case, self.z = case, z
        cache = Paged(page=PAGE)
        self.engine = Engine(Cached(graphdef, params, cache=cache, rows=len(case.sequences), length=case.length))
        start = time.perf_counter()
        self.engine.compile()
        self.compile_seconds = time.perf_counter() - start
        self.first: list[float] = []
        self.most_pages = 0

    def __call__(self, n: int) -> list[list[int]]:
        """Generate for the prompts of round `n`; return the tokens of each sequence."""
        from jaxscale.infer.engine import Request
        from jaxscale.infer.sampling import Sampling

        begin, first = time.perf_counter(), 0.0
        out: list[list[int]] = [[] for _ in self.case.sequences]
        for i, prompt in enumerate(self.case.prompts(n, self.z.vocab)):
            self.engine.submit(Request(prompt, Sampling(max_tokens=self.case.sequences[i][1], temperature=0.0), i))
        while self.engine.busy:
            for event in self.engine.step():
                out[event.id].append(event.token)
            first = first or time.perf_counter() - begin
        self.first.append(first)
        return out

    def cache_bytes(self, model: Any) -> int:
        """Return the bytes of the pages that the finished sequences occupy."""
        from jaxscale.infer.cache import Paged, cache_bytes

        pages = sum(-(-(prompt + new) // PAGE) for prompt, new in self.case.sequences)
        return cache_bytes(model, Paged(page=PAGE, pages=pages), 1, 1, PAGE)


class Theirs:
    """`generate` with a cache, greedy; prompts are padded on the left, all sequences run as long as the longest."""

    def __init__(self, model: Any, case: Case, z: Sizes):
        self.model, self.case, self.z = model, case, z

    def __call__(self, n: int, new: int | None = None) -> list[list[int]]:
        """Generate for the prompts of round `n`; return the tokens of each sequence."""
        out = self.generate(n, new).sequences[:, self.longest :]
        return [row[: self.case.sequences[i][1]].tolist() for i, row in enumerate(out)]

    @property
    def longest(self) -> int:
        """Return the length of the longest prompt."""
        return max(prompt for prompt, _ in self.case.sequences)

    def generate(self, n: int, new: int | None = None) -> Any:
        """Return what `transformers` generates for the prompts of round `n`."""
        import torch

        prompts = self.case.prompts(n, self.z.vocab)
        ids = torch.tensor([[0] * (self.longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (self.longest - len(p)) + [1] * len(p) for p in prompts])
        new = new or max(new for _, new in self.case.sequences)
        options = dict(do_sample=False, max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True)
        with torch.inference_mode():
            return self.model.generate(ids, attention_mask=mask, **options)

    def first(self, n: int) -> float:
        """Return the seconds to the first token."""
        start = time.perf_counter()
        self.generate(n, 1)
        return time.perf_counter() - start

    def cache_bytes(self) -> int:
        """Return the bytes of the cache after a round."""
        cache = self.generate(0).past_key_values
        return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def make_theirs(z: Sizes) -> Any:
    """Return a Llama with random weights and no end id."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=z.vocab,
        hidden_size=z.width,
        intermediate_size=z.hidden,
        num_hidden_layers=z.layers,
        num_attention_heads=z.heads,
        num_key_value_heads=z.kv_heads,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.05,  # large enough that greedy choices are unambiguous
        tie_word_embeddings=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def same_weights(model: Any) -> tuple[Any, Any]:
    """Return our model with their weights, which pass through a folder of `save_pretrained`."""
    from jaxscale.convert.pretrained import read_pretrained
    from jaxscale.interop.pretrained import open_pretrained
    from jaxscale.step import describe_model

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        pretrained = open_pretrained(Path(folder))
        return describe_model(pretrained.config)[0], read_pretrained(pretrained, None)


def compare(case: Case, z: Sizes, model: Any, graphdef: Any, params: Any, rounds: int) -> dict[str, Any]:
    """Check that both generate the same tokens, then time them in turns; return a row."""
    from flax import nnx

    ours, theirs = Ours(graphdef, params, case, z), Theirs(model, case, z)
    if ours(0) != theirs(0):
        raise SystemExit(f"{case.name}: the two generate different tokens, so a comparison would mean nothing")
    counters = {"ours": iter(range(1, 10**6)), "theirs": iter(range(1, 10**6))}
    timed = measure.interleaved(
        {"ours": lambda: ours(next(counters["ours"])), "theirs": lambda: theirs(next(counters["theirs"]))},
        rounds,
        warmup=1,
    )
    ours_first = ours.first[-rounds:]
    theirs_first = [theirs.first(i) for i in range(rounds + 1)][1:]
    speed = {name: case.new / statistics.median(t.wall) for name, t in timed.items()}
    return {
        "name": case.name,
        "texts": case.sequences,
        "tokens_per_second": speed,
        "speed_ratio": dataclasses.asdict(measure.ratio(timed["theirs"].wall, timed["ours"].wall)),
        "speed_cpu_ratio": dataclasses.asdict(measure.ratio(timed["theirs"].cpu, timed["ours"].cpu)),
        "first_token_seconds": {"ours": statistics.median(ours_first), "theirs": statistics.median(theirs_first)},
        "first_token_ratio": dataclasses.asdict(measure.ratio(ours_first, theirs_first)),
        "cache_bytes": {"ours": ours.cache_bytes(nnx.merge(graphdef, params)), "theirs": theirs.cache_bytes()},
        "compile_seconds": ours.compile_seconds,
        "seconds": {name: t.wall for name, t in timed.items()},
        "engine": ours.engine.stats._asdict(),
    }


# ---- the run as a whole


def main() -> None:
    """Measure every case, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, action="append", help="only these rows; nothing is written")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed rounds of each (default {ROUNDS})")
    args = parser.parse_args()
    import jax

    z = Sizes()
    model = make_theirs(z)
    graphdef, params = same_weights(model)
    rows = {}
    for key in args.only or CASES:
        print(f"measuring {CASES[key].name} …", flush=True)
        rows[key] = compare(CASES[key], z, model, graphdef, params, args.rounds)
    facts = measure.facts(jax.devices()[0].device_kind)
    facts["versions"] |= {"transformers": __import__("transformers").__version__}
    parameters = sum(p.numel() for p in model.parameters())
    result = {**facts, "sizes": dataclasses.asdict(z), "parameters": parameters, "target": TARGET, "rows": rows}
    show(result)
    if not args.only:
        print(f"written to {measure.write('generate', result).relative_to(measure.ROOT)}")
        measure.fill("generate", HEADER, lines(result))


HEADER = ("row", "ours", "theirs", "ratio", "quartiles", "target", "verdict")


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    title = f"ours against transformers · {result['parameters'] / 1e6:.1f}M parameters · {result['host']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "row" else "right")
    for line in lines(result):
        table.add_row(*line)
    console = Console(highlight=False)
    Console(highlight=False, width=None if console.is_terminal else 132).print(table)


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of the table; every ratio is ours over theirs."""
    out: list[tuple[str, ...]] = []
    spread = lambda r: f"{r['low']:.2f}–{r['high']:.2f}"  # noqa: E731
    for key, row in result["rows"].items():
        speed, r = row["tokens_per_second"], row["speed_ratio"]
        judged = ("", "")
        if key == "eight":
            judged = (f"≥ {result['target']}", "met" if r["median"] >= result["target"] else "missed")
        cells = (f"{speed['ours']:,.0f}", f"{speed['theirs']:,.0f}", f"{r['median']:.2f}", spread(r))
        out.append((f"{row['name']}: tokens/s", *cells, *judged))
        cpu = row["speed_cpu_ratio"]
        out.append(("– tokens per processor second", "", "", f"{cpu['median']:.2f}", spread(cpu), "", ""))
        first, r = row["first_token_seconds"], row["first_token_ratio"]
        cells = (f"{first['ours'] * 1e3:,.0f}", f"{first['theirs'] * 1e3:,.0f}", f"{r['median']:.2f}", spread(r))
        out.append(("– first token, ms", *cells, "", ""))
        cache = row["cache_bytes"]
        own, other = cache["ours"], cache["theirs"]
        cells = (f"{own / 2**20:.1f}", f"{other / 2**20:.1f}", f"{own / other:.2f}")
        out.append(("– cache at the end, MiB", *cells, "", "", ""))
    return out


if __name__ == "__main__":
    main()
