"""Data: corpora, tokenizers, token files, packing, and batches as a function of the step.

    source = python_stdlib().source(ByteTokenizer(), seq_len=256, split="train")
    batch = Loader(source, batch_size=32, seed=0).batch_at(step)

Corpora have the same names here as in a gin file. Heavy packages are imported only when they are used.
"""

from jaxscale.data.annotations import Annotated as annotated
from jaxscale.data.batch import KEYS, Batch, Corpus, Ordered, Source
from jaxscale.data.bin_tokens import BinTokens as bin_tokens
from jaxscale.data.cache import cache_folder
from jaxscale.data.chat import ChatTemplate
from jaxscale.data.chat_files import ChatFiles as chat_files
from jaxscale.data.devices import to_devices
from jaxscale.data.documents import TextCorpus
from jaxscale.data.hf_dataset import HFDataset as hf_dataset
from jaxscale.data.infilling import Infilled as infilled
from jaxscale.data.jsonl_files import JsonlFiles as jsonl_files
from jaxscale.data.labelled_files import LabelledFiles as labelled_files
from jaxscale.data.loader import Loader, heldout_batches
from jaxscale.data.markov import Synthetic as synthetic
from jaxscale.data.megatron_tokens import MegatronTokens as megatron_tokens
from jaxscale.data.mixing import Mixture as mixture
from jaxscale.data.ngrams import NGrams
from jaxscale.data.packing import PACKINGS
from jaxscale.data.parquet_files import ParquetFiles as parquet_files
from jaxscale.data.preference_files import PreferenceFiles as preference_files
from jaxscale.data.prepared import PreparedTokens as token_file
from jaxscale.data.prompts import Arithmetic as arithmetic
from jaxscale.data.prompts import Prompt, Prompts
from jaxscale.data.prompts import PromptFiles as prompt_files
from jaxscale.data.prompts import PromptList as prompt_list
from jaxscale.data.pruned import Pruned as pruned
from jaxscale.data.rated_files import RatedFiles as rated_files
from jaxscale.data.records import UserRecords as records
from jaxscale.data.records import as_corpus
from jaxscale.data.storage import TokenFile
from jaxscale.data.text import PythonStdlib as python_stdlib
from jaxscale.data.text import TextFiles as text_files
from jaxscale.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, train_bpe
from jaxscale.data.uploading import prepare, write_token_file

__all__ = [
    "KEYS",
    "PACKINGS",
    "Batch",
    "ByteTokenizer",
    "ChatTemplate",
    "Corpus",
    "HFTokenizer",
    "Loader",
    "NGrams",
    "Ordered",
    "Prompt",
    "Prompts",
    "Source",
    "TextCorpus",
    "TokenFile",
    "Tokenizer",
    "annotated",
    "arithmetic",
    "as_corpus",
    "bin_tokens",
    "cache_folder",
    "chat_files",
    "heldout_batches",
    "hf_dataset",
    "infilled",
    "jsonl_files",
    "megatron_tokens",
    "mixture",
    "parquet_files",
    "preference_files",
    "prepare",
    "prompt_files",
    "prompt_list",
    "pruned",
    "python_stdlib",
    "labelled_files",
    "rated_files",
    "records",
    "synthetic",
    "text_files",
    "to_devices",
    "token_file",
    "train_bpe",
    "write_token_file",
]
