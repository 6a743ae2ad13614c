"""Names of settings in MaxText, Levanter, TorchTitan, Hugging Face and others, for suggestions in error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_TABLE = """
lr: learningrate peaklr maxlr baselr stepsize
steps: numsteps maxsteps trainsteps numtrainsteps trainingsteps totalsteps iterations maxiters trainiters
batch_size: globalbatchsize trainbatchsize perdevicebatchsize perdevicetrainbatchsize localbatchsize batch bs
seq_len: maxtargetlength maxseqlen maxseqlength maxlength sequencelength seqlength contextlength blocksize contextsize
clip_norm: gradclip gradclipnorm clipgradnorm maxgradnorm maxnorm gradientclipping gradientclippingthreshold
clip_norm: gradientclipval clipgradient
accumulate: gradientaccumulationsteps gradientaccumulation gradaccum gradaccumsteps accumsteps accumulationsteps
accumulate: microbatches accumulategradbatches
optimizer: optim opt opttype optimizertype
schedule: scheduler lrschedule lrscheduler lrscheduletype lrschedulertype
checkpoint_every: saveevery saveinterval savesteps checkpointperiod checkpointinterval ckptevery checkpointsteps
eval_every: evalinterval evalsteps evalperiod valevery valinterval
eval_batches: evaliters maxevalbatches
data: dataset datasetname datasetpath datasettype datapath traindata corpus
start: initfrom initfromhf initializefromhf loadfrom loadparameterspath pretrained pretrainedpath
seed: randomseed rngseed dataseed
keep: keepcheckpoints savetotallimit maxtokeep keeplatestk
adapters: lora peft
callbacks: hooks hook callback trainercallback
trackers: tensorboard tensorboarddir wandb usewandb mlflow reportto logger loggers logto tracker
NextToken.loss: loss lossfn
NextToken.z_loss: zloss zlossmultiplier zlossweight
objective: task losstype
segments: documentmask docmask resetpositionids
train.seq_len: maxpositionembeddings
train.model: model modelname
train.optimizer: optimizer optim
train.data: dataset
train.layout: parallelism
dtype Transformer.dtype: dtype precision computedtype activationdtype mixedprecision mixedprecisionparam
param_dtype Transformer.param_dtype: paramdtype paramsdtype weightdtype masterdtype
memory Transformer.memory: remat rematpolicy activationcheckpoint activationcheckpointing activationcheckpointmode
memory Transformer.memory: gradientcheckpointing recompute recomputation
vocab Transformer.vocab: vocabsize nvocab paddedvocabsize
weight_decay AdamW.weight_decay: weightdecay wd adamweightdecay
warmup WarmupCosine.warmup: warmupsteps warmup numwarmupsteps warmupiters warmupratio warmupfraction warmupstepsfraction
Layout.mesh: mesh meshshape meshaxes
Layout.rules: rules shardingrules logicalaxisrules shardingstrategy
Layout.pipeline: pipelineschedule pipelineparallelschedule ppschedule pipeline
theta Rotary.theta: ropetheta ropebase rotarybase ropemaxtimescale
experts MixtureOfExperts.experts: numexperts nexperts numlocalexperts nroutedexperts
top_k MixtureOfExperts.top_k: numexpertspertok numexpertspertoken expertspertoken moetopk
b1 b2: betas adambetas
b1: beta1 adamb1 adambeta1
b2: beta2 adamb2 adambeta2
eps: epsilon adameps adamepsilon
depth Transformer.depth: numlayers nlayers nlayer layers numhiddenlayers
depth Transformer.depth: numdecoderlayers basenumdecoderlayers numblocks nblocks depth
attention_layer: mixer sequencemixer tokenmixer mixertype attentiontype
heads Transformer.heads: numheads nheads nhead numattentionheads numqueryheads basenumqueryheads heads
kv_heads Transformer.kv_heads: numkvheads nkvheads numkeyvalueheads basenumkvheads numquerygroups kvheads
width Transformer.width: hiddensize dmodel nembd baseembdim embdim embeddim
width Transformer.width: embedsize embeddingsize modeldim dim hiddendim width
hidden Transformer.hidden: intermediatesize intermediatedim ffndim ffnsize ffnhiddensize
hidden Transformer.hidden: ffdim mlpdim basemlpdim dff hiddendim hidden
norm_eps: rmsnormeps layernormeps layernormepsilon normalizationlayerepsilon
tied: tiewordembeddings tieembeddings tieweights weighttying logitsviaembedding
attention: useflash useflashattention flashattention attentiontype attnimpl attnimplementation attnbackend
scan: scanlayers
positions: positionalembedding positionembeddingtype posemb
dropout Transformer.dropout: dropoutrate hiddendropout residpdrop residualdropout dropout
attention_dropout: attnpdrop attndropout attentionprobsdropoutprob
windows: slidingwindow slidingwindowsize
logit_softcap: finallogitsoftcap finallogitsoftcapping finallogitssoftcap
attention_softcap: attnlogitsoftcap attnlogitsoftcapping attnlogitssoftcap
qkv_bias: attentionbias
data: dp ddp replicas replicate dpreplicate dataparallelreplicate batch
fsdp: dpshard dataparallelshard shard zero zero2 zero3 fullysharded hsdp fsdptranspose
tensor: tp mp model mdl megatron tensortranspose
pipeline: pp pipe stage stages
context: cp seq sequence sp ring ulysses
expert: ep experts moe
replicated: dp ddp data
fsdp_tensor: fsdptp 2d
1f1b: onefoneb oneforwardonebackward
zb-h1: zb zerobubble zbh1 interleavedzerobubble
zb-v: zbv zbvzerobubble
dualpipe-v: dualpipev
AdamW: adam nadam adamax adagrad rmsprop sophia
AdamW8bit: adam8bit pagedadamw8bit
SOAP: shampoo distributedshampoo
SGD: sgdm momentum
ScheduleFreeAdamW: schedulefree adamwschedulefree
Muon: muonadamw
WarmupCosine: cosine cosinedecay cosineannealing cosineannealinglr cosinewithwarmup
WSD: linear lineardecay linearwarmup inversesqrt trapezoidal warmupstabledecay
gpt2: gpt gpt3 nanogpt
llama3_8b: llama llama2 llama3 llama27b llama318b
qwen3: qwen qwen2 qwen25
mixtral_8x7b: mixtral
glob: path paths file files filename filenames pattern filepattern datafiles inputfiles
text_files: c4 fineweb finewebedu wikitext openwebtext pile slimpajama tinyshakespeare text txt jsonl hf hfdataset files
token_file: bin memmap tokens megatron indexeddataset
synthetic: random dummy mock fake
chat_files: chat sft sharegpt instruct alpaca
preference_files: preference preferences pairs ultrafeedback hhrlhf dpo
RewardModel: reward rewardtrainer bradleyterry rm
WithHead: automodelforsequenceclassification sequenceclassification scorehead rewardhead
Classification: classify classifier sequenceclassification
labelled_files: labels labeled labeledfiles textclassification glue imdb
rated_files: kto unpaired binaryfeedback thumbs
python_stdlib: python code stdlib
mixture: blend weighted
HFTokenizer: tiktoken sentencepiece spm bpe huggingface gpt2tokenizer autotokenizer llamatokenizer
ByteTokenizer: byte bytes char character
flash_attention: flash splash splashattention cudnn cudnnflashte flashattention2 fa2 fa3
dot_product_attention: sdpa xla dotproduct eager
RingAttention: ring
UlyssesAttention: ulysses alltoall
LoRA: qlora
SoftPrompt: prompttuning softprompts prefixtuning ptuning
MultiHead: mha gqa mqa multiheadattention groupedqueryattention
MultiHeadLatent: mla multiheadlatentattention
LongConvolution: hyena hyenaoperator longconv
HyperZZW: terminator hyperkernel hyperz
NSA: nativesparseattention
DSA: deepseeksparseattention lightningindexer deepseeksparse
Mamba2: mamba ssd
GatedDeltaNet: deltanet gdn
GatedLinearAttention: gla
KimiDeltaAttention: kda kimilinear
GatedMemory: gmu gatedmemoryunit
CrossDecoderAttention: yoco crossdecoder crossattention
NextTokens: mtp multitoken multitokenprediction
BlankInfilling: infilling
v4: tpuv4
v5e: v5lite v5litepod tpuv5e tpuv5lite tpuv5litepod tpu
v5p: v5 tpuv5 tpuv5p
v6e: v6 trillium tpuv6 tpuv6e
tpu7x: v7 v7x ironwood tpuv7 tpuv7x
a100: ampere a10040gb a10080gb
h100: hopper gpu cuda h10080gb h100sxm
h200: gpu h200sxm
b200: blackwell b100
b300: blackwellultra
gb200: graceblackwell gb200nvl72
gb300: gb300nvl72
mi300x: amd instinct mi300
mi355x: mi355 mi350 mi350x
slurm: sbatch srun
kubernetes: k8s kube gke jobset
skypilot: sky
train: fit run finetune pretrain resume trainer training
sample: generate chat inference infer predict complete
eval: evaluate perplexity
serve: server api
import: convert load download
export: convert save
report: compare view visualize dashboard plot
plan: estimate
microbench: bench benchmark
explain: inspect describe shardings
run: outputdir outputdirectory baseoutputdirectory savedir logdir workdir rundir runname name dumpfolder
devices: gpus numdevices numgpus ngpu ngpus
quiet: silent
"""


def fold(name: str) -> str:
    """Return a name in lower case without punctuation and common affixes: `ici_tensor_parallelism` is `tensor`."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(?:ici|dcn)(?=.)|(?<=.)(?:parallelism|paralleldegree|paralleldim|degree|parallel)$", "", plain)


def _read() -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for line in _TABLE.strip().splitlines():
        ours, _, theirs = line.partition(":")
        for name in theirs.split():
            names[name] = tuple(dict.fromkeys((*names.get(name, ()), *ours.split())))
    return names


_ALIKE = 0.85
"""The least similarity of a misspelt name and another program's."""

OURS = _read()
"""Folded names of other programs -> ours. Ours is a binding if it has a dot, else any name."""


def same(word: str, known: Iterable[str], *, bindings: bool = False) -> list[str]:
    """Return the known names that mean the same as a word: another spelling of it, or another program's name.

    Args:
      word: the unknown name.
      known: the valid names.
      bindings: if no known name matches, also return bindings of other parts, such as `Layout.mesh`.
    """
    known = sorted(set(known))
    spelt = [name for name in known if fold(name) == fold(word)]
    ours = OURS.get(fold(word), ())
    return spelt or [name for name in ours if name in known] or [name for name in ours if bindings and "." in name]


def misspelt(word: str, known: Iterable[str], *, bindings: bool = False, beyond: float = 0.0) -> list[str]:
    """Return the known names that another program's name stands for which a word nearly is: `lr` for `learning_rte`.

    Args:
      word: the unknown name.
      known: the valid names.
      bindings: see `same`.
      beyond: how similar the word must be at least to the other program's name, from 0 to 1; never less than 0.85.
    """
    folded = fold(word)
    for name in difflib.get_close_matches(folded, OURS, 5, _ALIKE):
        if difflib.SequenceMatcher(None, name, folded).ratio() > beyond:
            if names := same(name, known, bindings=bindings):
                return names
    return []
